"""OpenRLHF's SamplesGenerator with policy versions, the engine's log-probs, and a reward for every sample.

If a response gets no reward, its prompt group is dropped and counted by reason, and another prompt takes its place. The
run ends if too many groups are dropped.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bapo.offpolicy.partial_rollouts import PartialPool
from openrlhf_bapo.openrlhf.long_prompts import find_cut_prompts
from openrlhf_bapo.openrlhf.prompt_starts import find_wrong_starts
from openrlhf_bapo.openrlhf.reward_calls import FAILED_REWARD, RewardFault, read_number
from openrlhf_bapo.openrlhf.sample_buffer import SampleBuffer
from openrlhf_bapo.openrlhf.settings import compares_engine, has_clip_rule, is_off_policy, num_ranks_of
from openrlhf_bapo.openrlhf.vllm_engine import PlacedPrompt

logger = init_logger(__name__)

_SamplingParams = samples_generator.SamplingParams


class RolloutSamples(list):
    """The samples of one training step, a list as OpenRLHF's trainers expect, with the rollout's state and metrics."""

    def __init__(
        self,
        samples: list[Experience],
        metrics: dict[str, float],
        unfinished: PartialPool | None = None,
        buffer: SampleBuffer | None = None,
    ) -> None:
        super().__init__(samples)
        self.metrics = metrics
        self.unfinished = unfinished
        """Under a token budget, the pool of unfinished responses after this rollout."""
        self.buffer = buffer
        """Samples that wait for later training steps; None if there are none."""


def evaluation_place(num_prompts: int) -> int:
    """Return the place of an evaluation's first prompt, after `num_prompts` training prompts were drawn.

    Training prompts have the places 0, 1, and so on. Evaluation prompts have negative places, so that they share no
    seed with training prompts. Each number of training prompts has a range of 2**32 places: an evaluation before
    training has -2**32, -2**32 + 1, and so on, and one after 7 prompts has -8 * 2**32, -8 * 2**32 + 1, and so on.
    """
    return -(num_prompts + 1) * 2**32


def evaluation_row(place: int) -> int:
    """Return the number, from 0, of the evaluation's prompt at this place."""
    return place % 2**32


class VersionedSamplesGenerator(samples_generator.SamplesGenerator):
    """Upstream's generator. If an off-policy feature is on, every sample has the policy versions of its tokens.

    The samples are in the order of their prompts, not in that of their completion. With
    `--train.full_determinism_enable` the seed of each sample follows from `--train.seed` and the prompt's place in the
    run.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_prompts = 0
        """Prompts drawn for training so far, including those before a resume."""
        self._next_evaluation_place: int | None = None  # None outside evaluations
        # Upstream requests log-probs for its own IS correction only, and has no setting for it.
        ours = {"logprobs": 1} if is_off_policy(self.args) else {}
        if self.args.train.full_determinism_enable:
            ours["seed"] = self.args.train.seed
        samples_generator.SamplingParams = lambda **params: _SamplingParams(**params | ours)
        limits = self.args.reward_fault
        for engine in self.vllm_engines:
            engine.limit_rewards.remote(limits.patience, limits.timeout)
            if flag := compares_engine(self.args):
                engine.compare_log_probs.remote(flag, _SamplingParams(temperature=self.args.rollout.temperature))
        self._lost: Counter[str] = Counter()
        """Groups that were dropped without a reward since the last log, by reason."""
        self._has_lost_groups = False
        filters, limits = self.args.algo.dynamic_filtering_enable, self.args.algo.dynamic_filtering_range
        self._warns_of_filter = filters and tuple(limits) == (0, 1)
        self.untrained: Counter[str] = Counter()
        """Groups of this run that are not trained on, by reason."""
        find_cut = functools.partial(find_cut_prompts, self.args, self.tokenizer)
        self._cut_prompts = find_cut("--data.prompt_dataset", self.prompts_dataloader)
        find_cut("--eval.dataset", self.eval_dataloader)
        prompts = self.prompts_dataloader.dataset.prompts if self.prompts_dataloader else []
        if wrong := find_wrong_starts(self.tokenizer, prompts):
            print(f"openrlhf-bapo: warning: --data.prompt_dataset: {wrong}", flush=True)
        self._num_left_over = 0  # groups since the last log
        # A dynamic batch leaves out what fills no optimizer step, always the samples of middle length.
        self._needs_whole_steps = (
            has_clip_rule(self.args) or self.args.replay.ratio > 0 or self.args.train.dynamic_batch_enable
        )
        self._saved_buffer: SampleBuffer | None = None  # from a checkpoint, until the first rollout

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """Generate the samples of one training step.

        The last batch of the data may be short. After dropped groups, with a clip rule of ours, replay or a dynamic
        batch, it is cut to whole optimizer steps. DeepSpeed would otherwise add what is left over to the next batch's
        first step. With several ranks it is always cut so that all get as many samples.

        Returns:
            As upstream: the samples; the percentage of groups that passed dynamic filtering; the number of prompts
            drawn; whether the data of the episode are exhausted.
        """
        if (saved := self._saved_buffer) is not None:
            self._saved_buffer, self._sample_buffer = None, saved.experiences()
            self._dataloader_iter = None if saved.exhausted else iter(self.prompts_dataloader)
        samples, pass_rate, *others = super().generate_samples(**generate_kwargs)
        size = self.args.rollout.n_samples_per_prompt
        if pass_rate is not None:
            pass_rate /= size  # upstream divides the number of samples by that of prompts
        if len(samples) < self.args.rollout.batch_size * size:
            num_groups = len(samples) // size
            needs_whole_steps = self._has_lost_groups or self._needs_whole_steps
            samples = samples[: self._num_trainable(num_groups, needs_whole_steps) * size]
            if left_over := num_groups - len(samples) // size:
                logger.info(f"{left_over} prompt groups at the end of the data fill no step on all ranks: dropped")
                self._num_left_over += left_over
                self.untrained["left_over"] += left_over
        metrics = self._fault_metrics(samples) if samples else {}
        if samples and self._num_left_over:
            metrics["rollout/groups_left_over"], self._num_left_over = float(self._num_left_over), 0
        buffer = None
        if self._sample_buffer:
            buffer = SampleBuffer.of(self._sample_buffer, self._dataloader_iter is None)
        if self.args.train.async_enable:
            metrics["rollout/samples_waiting"] = float(len(self._sample_buffer))
        return RolloutSamples(samples, metrics, buffer=buffer), pass_rate, *others

    def take_up_buffer(self, buffer: SampleBuffer) -> None:
        """Continue with the samples that waited when the checkpoint was written."""
        self._saved_buffer = buffer

    def begin_other_prompts(self) -> None:
        """Draw prompts of a resumed run, even if all of those before, which others replace, had been drawn."""
        if self._saved_buffer is not None:
            self._saved_buffer.exhausted = False

    def _fault_metrics(self, samples: list[Experience]) -> dict[str, float]:
        """Return the number of groups dropped since the last call, as "reward_fault/dropped" and by reason.

        If the data have prompts that are too long, "rollout/prompts_cut" counts their groups among the samples.
        """
        lost, self._lost = +self._lost, Counter()
        metrics = {f"reward_fault/{reason}": float(count) for reason, count in lost.items()}
        if self._cut_prompts:
            num_cut = sum(prompt in self._cut_prompts for sample in samples for prompt in sample.prompts)
            metrics["rollout/prompts_cut"] = num_cut / self.args.rollout.n_samples_per_prompt
        return {"reward_fault/dropped": float(lost.total()), **metrics}

    def _generate_vllm(
        self, dataloader_iter: Iterator, num_prompts: int, dynamic_filtering: bool, **generate_kwargs: Any
    ) -> tuple[list[Experience], int, bool]:
        size = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        found, num_drawn, num_lost, num_missing, exhausted = [], 0, 0, num_prompts, False
        while num_missing and not exhausted:
            samples, drawn, exhausted = super()._generate_vllm(
                dataloader_iter, num_missing, dynamic_filtering, **generate_kwargs
            )
            samples = sorted(samples, key=lambda sample: sample.place)  # the samples of a group have one place
            num_drawn, num_missing = num_drawn + drawn, 0
            self.untrained["filtered"] += drawn - len(samples) // size
            for start in range(0, len(samples), size):
                group = samples[start : start + size]
                faults = [sample.reward_fault for sample in group if sample.reward_fault is not None]
                if faults:
                    num_missing, num_lost = num_missing + 1, num_lost + 1
                    self._lose(faults[0], num_lost, num_prompts)
                else:
                    found += group
        return found, num_drawn, exhausted

    def _lose(self, fault: RewardFault, num_lost: int, batch_size: int) -> None:
        """Count a group that is dropped because of `fault`, the `num_lost`th of a batch of `batch_size` groups.

        Raises:
            RuntimeError: if more groups are dropped than `--reward_fault.max_drop_rate` allows.
        """
        self._lost[fault.kind] += 1
        if self._next_evaluation_place is None:
            self._has_lost_groups = True
            self.untrained["unrewarded"] += 1
        logger.warning(f"a prompt group has no reward and is dropped: {fault.text}")
        rate = self.args.reward_fault.max_drop_rate
        if num_lost > rate * batch_size:
            flag, source = "reward.remote_url", ",".join(self.args.reward.remote_url)
            if self.args.train.agent_func_path:
                flag, source = "train.agent_func_path", self.args.train.agent_func_path
            raise RuntimeError(
                f"--{flag} {source}: {fault.text}; {num_lost} of a batch's {batch_size} prompt groups have no reward, "
                f"--reward_fault.max_drop_rate {rate:g} allows {math.floor(rate * batch_size)}"
            )

    def _read_reward(self, response: dict) -> dict:
        """Return a response's "reward" and "scores" as numbers, or {} if a reward model will compute them later.

        Raises:
            RewardFault: if the response has no valid reward or score.
        """
        if not self.args.reward.remote_url:
            return {}
        if (cause := response["extra_logs"].get(FAILED_REWARD)) is not None:
            raise RewardFault.parse(cause)
        try:
            reward = score = read_number(response["reward"], "the reward of a response")
            if response["scores"] is not None:
                score = read_number(response["scores"], "the score of a response")
        except RewardFault as fault:
            raise RewardFault(fault.kind, f"{fault.text}; the engine's log (RolloutRayActor) may say why") from None
        self._warn_of_filter(score)
        return {"reward": reward, "scores": score}

    def _warn_of_filter(self, score: float) -> None:
        """Warn once of a score for which OpenRLHF's default filter, of mean scores from 0 to 1, is not made.

        Of scores -1 and 1 it would drop all groups with no more than half of them right.
        """
        if self._warns_of_filter and not 0 <= score <= 1:
            self._warns_of_filter = False
            print(
                f"openrlhf-bapo: warning: --algo.dynamic_filtering_range 0 1: a response has the score {score:g}, and "
                "groups whose mean score is not between 0 and 1 are dropped; usual: the lowest and the highest score",
                flush=True,
            )

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        """Generate as upstream, at places that no training prompt has."""
        self._next_evaluation_place = evaluation_place(self.num_prompts)
        try:
            return super().generate_eval_samples(**generate_kwargs)
        finally:
            self._next_evaluation_place = None

    def _dispatch_prompts_to_vllm(self, prompts: list[str], *args: Any, **kwargs: Any) -> list:
        if self._next_evaluation_place is None:
            first = self.num_prompts
            self.num_prompts += len(prompts)
        else:
            first = self._next_evaluation_place
            self._next_evaluation_place += len(prompts)
        placed = [PlacedPrompt(place, text) for place, text in enumerate(prompts, start=first)]
        return super()._dispatch_prompts_to_vllm(placed, *args, **kwargs)

    def _process_response_into_experience(self, response: dict, **generate_kwargs: Any) -> Experience:
        """Convert a response as upstream does, and set the sample's `place`, `reward_fault` and `versions`."""
        # A reward server gives each value as a list of one.
        logs = {name: value[0] if isinstance(value, list) else value for name, value in response["extra_logs"].items()}
        try:
            response, fault = response | {"extra_logs": logs} | self._read_reward(response), None
        except RewardFault as error:
            response, fault = response | {"extra_logs": {}, "reward": None, "scores": None}, error
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        # Upstream counts the tokens between an agent's actions too, and so do its length penalties.
        experience.response_length = experience.action_mask.sum(-1)
        experience.place = response.get("place")
        experience.reward_fault = fault
        if is_off_policy(self.args):
            versions = torch.zeros(len(response["observation_tokens"]), dtype=torch.int32)
            for (start, end), action_versions in zip(response["action_ranges"], response["versions"], strict=True):
                versions[start:end] = torch.tensor(action_versions, dtype=torch.int32)
            # Cut to [1, T - 1], as upstream cuts the action mask.
            experience.versions = versions[1 : experience.sequences.shape[1]].unsqueeze(0)
        return experience

    def _num_trainable(self, num_groups: int, needs_whole_steps: bool = True) -> int:
        """Return how many of `num_groups` groups fill whole optimizer steps, if that is needed.

        Upstream splits the micro-batches of the log-probs over the ranks of actor and critic. All ranks must get as
        many, because they wait for each other.
        """
        train, size = self.args.train, self.args.rollout.n_samples_per_prompt
        num_ranks = math.lcm(*num_ranks_of(self.args).values())
        unit = train.batch_size if needs_whole_steps else 1
        if num_ranks > 1 and not train.dynamic_batch_enable:
            unit = math.lcm(unit, self.args.rollout.micro_batch_size * num_ranks)
        return num_groups - num_groups % (unit // math.gcd(unit, size))
