"""OpenRLHF's SamplesGenerator, whose samples carry policy versions and, where needed, the engine's log-probs.

And whose samples all have a reward: a prompt group with a response that has none is dropped and counted by reason, and
another prompt takes its place. Too many of them end the run.
"""

import math
from collections import Counter
from collections.abc import Iterator

import torch
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bapo.core.partial_rollouts import PartialPool
from openrlhf_bapo.openrlhf.reward_calls import FAILED_REWARD, RewardFault, read_number
from openrlhf_bapo.openrlhf.settings import is_off_policy

logger = init_logger(__name__)

_SamplingParams = samples_generator.SamplingParams


class RolloutSamples(list):
    """The samples of one training step, as OpenRLHF's trainers pass them on, and what came with them."""

    def __init__(self, samples: list[Experience], unfinished: PartialPool | None, metrics: dict[str, float]) -> None:
        super().__init__(samples)
        self.unfinished = unfinished
        """Under a token budget, the pool as it was when they were handed over."""
        self.metrics = metrics


class VersionedSamplesGenerator(samples_generator.SamplesGenerator):
    """Upstream's; with any of our off-policy features on, every sample knows where its tokens come from.

    Samples come in the order of their prompts, whichever was there first; with `--train.full_determinism_enable` each
    is drawn with a seed that follows from `--train.seed` and the prompt's place in the run.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.num_prompts = 0
        """Prompts drawn for training so far, those before a resume included."""
        # Upstream asks for log-probs only for its own IS correction, and offers no other way in.
        ours = {"logprobs": 1} if is_off_policy(self.args) else {}
        if self.args.train.full_determinism_enable:
            ours["seed"] = self.args.train.seed
        samples_generator.SamplingParams = lambda **params: _SamplingParams(**params | ours)
        limits = self.args.reward_fault
        for engine in self.vllm_engines:
            engine.limit_rewards.remote(limits.patience, limits.timeout)
        self._lost: Counter[str] = Counter()
        """Groups without a reward since they were last logged, by reason."""
        self._is_whole = True
        """Whether no group of this run was lost."""

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs) -> tuple[list[Experience], float | None, int, bool]:
        """As upstream's; a rest that lost groups leave at the end of the data is cut to what can be trained on."""
        samples, *others = super().generate_samples(**generate_kwargs)
        size = self.args.rollout.n_samples_per_prompt
        if not self._is_whole and len(samples) < self.args.rollout.batch_size * size:
            num_groups = len(samples) // size
            num_trained = self._num_trainable(num_groups)
            self._lost["left_over"] += num_groups - num_trained
            samples = samples[: num_trained * size]
        return RolloutSamples(samples, None, self._fault_metrics() if samples else {}), *others

    def _fault_metrics(self) -> dict[str, float]:
        """What was lost since the last call: "reward_fault/dropped" (groups), and by reason, where there are any."""
        lost, self._lost = +self._lost, Counter()
        by_reason = {f"reward_fault/{reason}": float(count) for reason, count in lost.items()}
        return {"reward_fault/dropped": float(lost.total()), **by_reason}

    def _generate_vllm(
        self, dataloader_iter: Iterator, num_prompts: int, dynamic_filtering: bool, **generate_kwargs
    ) -> tuple[list[Experience], int, bool]:
        size = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        found, num_drawn, num_lost, num_missing, exhausted = [], 0, 0, num_prompts, False
        while num_missing and not exhausted:
            samples, drawn, exhausted = super()._generate_vllm(
                dataloader_iter, num_missing, dynamic_filtering, **generate_kwargs
            )
            samples = sorted(samples, key=lambda sample: sample.place)  # in which a group's samples stay together
            num_drawn, num_missing = num_drawn + drawn, 0
            for start in range(0, len(samples), size):
                group = samples[start : start + size]
                causes = [sample.reward_fault for sample in group if hasattr(sample, "reward_fault")]
                if causes:
                    num_missing, num_lost = num_missing + 1, num_lost + 1
                    self._lose(causes[0], num_lost, num_prompts)
                else:
                    found += group
        return found, num_drawn, exhausted

    def _lose(self, cause: str, num_lost: int, batch_size: int) -> None:
        """Count a group without a reward, the `num_lost`th of a batch.

        Raises:
            RuntimeError: if these are more than `--reward_fault.max_drop_rate` allows.
        """
        reason, text = cause.split(": ", 1)
        self._lost[reason] += 1
        self._is_whole = False
        logger.warning(f"a prompt group has no reward and is dropped: {text}")
        rate = self.args.reward_fault.max_drop_rate
        if num_lost > rate * batch_size:
            flag, source = "reward.remote_url", ",".join(self.args.reward.remote_url)
            if self.args.train.agent_func_path:
                flag, source = "train.agent_func_path", self.args.train.agent_func_path
            raise RuntimeError(
                f"--{flag} {source}: {text}; {num_lost} of a batch's {batch_size} prompt groups have no reward, "
                f"--reward_fault.max_drop_rate {rate:g} allows {math.floor(rate * batch_size)}"
            )

    def _read_reward(self, response: dict) -> tuple[dict, str | None]:
        """A response's reward and scores as numbers; or None for both, and the cause, as "REASON: TEXT"."""
        if not self.args.reward.remote_url:  # a reward model's comes later
            return {}, None
        cause = response["extra_logs"].get(FAILED_REWARD)
        if cause is None:
            try:
                reward = score = read_number(response["reward"], "the reward of a response")
                if response["scores"] is not None:
                    score = read_number(response["scores"], "the score of a response")
                return {"reward": reward, "scores": score}, None
            except RewardFault as fault:
                cause = f"{fault}; the engine's log (RolloutRayActor) may say why"
        return {"reward": None, "scores": None, "extra_logs": {}}, cause

    def generate_eval_samples(self, **generate_kwargs) -> list[Experience]:
        """As upstream's; the prompts have places of their own, which follow from how far training has come."""
        drawn, self.num_prompts = self.num_prompts, -(self.num_prompts + 1) << 32
        try:
            return super().generate_eval_samples(**generate_kwargs)
        finally:
            self.num_prompts = drawn

    def _dispatch_prompts_to_vllm(self, prompts: list[str], *args, **kwargs) -> list:
        placed = [*enumerate(prompts, start=self.num_prompts)]
        self.num_prompts += len(prompts)
        return super()._dispatch_prompts_to_vllm(placed, *args, **kwargs)

    def _process_response_into_experience(self, response: dict, **generate_kwargs) -> Experience:
        read, cause = self._read_reward(response)
        logs = {name: _first(value) for name, value in response["extra_logs"].items()}
        response = response | {"extra_logs": logs} | read
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        experience.place = response.get("place")
        if cause is not None:
            experience.reward_fault = cause
        if is_off_policy(self.args):
            versions = torch.zeros(len(response["observation_tokens"]), dtype=torch.int32)
            for (start, end), segment in zip(response["action_ranges"], response["versions"], strict=True):
                versions[start:end] = torch.tensor(segment, dtype=torch.int32)
            # Cut as upstream cuts the action mask: [1, T - 1].
            experience.versions = versions[1 : experience.sequences.shape[1]].unsqueeze(0)
        return experience

    def _num_trainable(self, num_groups: int) -> int:
        """How many of the last groups make whole micro-batches, as many on every rank: upstream trains no others."""
        train, ds, size = self.args.train, self.args.ds, self.args.rollout.n_samples_per_prompt
        num_ranks = self.args.actor.num_nodes * self.args.actor.num_gpus_per_node
        num_ranks //= ds.ring_attn_size * ds.tensor_parallel_size
        unit = train.micro_batch_size
        if train.dynamic_batch_enable:
            unit = train.batch_size // num_ranks
        elif num_ranks > 1:
            unit = math.lcm(unit, self.args.rollout.micro_batch_size)
        unit *= num_ranks
        return num_groups - num_groups % (unit // math.gcd(unit, size))


def _first(value):
    """A reward server answers one response with lists of one."""
    return value[0] if isinstance(value, list) else value
