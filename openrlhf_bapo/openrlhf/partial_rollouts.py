"""Rollouts under a token budget: OpenRLHF's SamplesGenerator with responses that go on in a later rollout.

And rollouts that wait: with `--offpolicy.lag` nothing is cut, and complete groups wait for so many rollouts.
"""

import math
import time
from collections.abc import Iterator

import ray
import torch
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bapo.core.partial_rollouts import Group, PartialPool, Response
from openrlhf_bapo.openrlhf.samples_generator import RolloutSamples, VersionedSamplesGenerator
from openrlhf_bapo.openrlhf.settings import partial_config_from_args

logger = init_logger(__name__)


def make_samples_generator(strategy, *args, **kwargs) -> VersionedSamplesGenerator:
    """The generator that the flags ask for, in OpenRLHF's own class's place."""
    kind = PartialSamplesGenerator if strategy.args.partial.token_budget else VersionedSamplesGenerator
    return kind(strategy, *args, **kwargs)


class PartialSamplesGenerator(VersionedSamplesGenerator):
    """Rollouts in which a response grows by at most `--partial.token_budget` tokens, and goes on in the next one.

    A rollout resumes the unfinished groups, starts as many new ones as `--partial.oversample` asks for, and hands over
    as soon as a training batch of complete groups is there; what is under way then stops where it is. If all have spent
    their budget before, another rollout follows at once, with the same weights.

    With `--offpolicy.lag` it hands over what was generated so many rollouts ago; the first one makes all that are to
    wait, and at the end of the data what waits is handed over without another.

    Evaluation generates as upstream's.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.pool = PartialPool(partial_config_from_args(self.args.partial))
        self._prompts: Iterator | None = None
        self._has_ended = False  # the episode, and its end has been reported

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs) -> tuple[list[Experience], float | None, int, bool]:
        """As upstream's: a training batch, shorter at the end of the data only; the share of groups that dynamic
        filtering let pass, in percent; the prompts drawn; whether the episode has ended."""
        if self._has_ended:
            self._prompts, self.pool.exhausted, self._has_ended = None, False, False
        if self._prompts is None and not self.pool.exhausted:
            self._prompts = iter(self.prompts_dataloader)
        began, num_taken = time.time(), self.args.rollout.batch_size
        num_needed = num_taken * (1 + self.args.offpolicy.lag)
        self._seconds_alone, self._num_prompts, self._num_lost, self._judged = 0.0, 0, 0, []
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "wake_up")
        while True:
            self.pool.expire(self._version())
            self._finish(self.pool.overdue(), generate_kwargs)
            num_missing = num_needed - len(self.pool.complete)
            groups = self.pool.unfinished
            if num_missing > 0:
                groups += self._start(math.ceil(self.args.partial.oversample * num_missing) - len(groups))
            if num_missing <= 0 or not groups:
                break
            self._grow(groups, num_needed, generate_kwargs)
        self._finish(self.pool.overdue(self._version()), generate_kwargs)
        if self.args.vllm.enable_sleep:
            batch_vllm_engine_call(self.vllm_engines, "sleep")

        if len(self.pool.complete) < num_needed:  # the end of the data
            for group in self.pool.complete[self._num_trainable(len(self.pool.complete)) :]:
                self.pool.drop(group, "left_over")
        groups = self.pool.take(num_taken)
        samples = [sample for group in groups for sample in self._to_experiences(group, generate_kwargs)]
        self._has_ended = self.pool.exhausted and len(self.pool) == 0
        metrics = self.pool.metrics() | {"partial/slowest_share": self._seconds_alone / (time.time() - began)}
        metrics |= self._fault_metrics()
        if not samples:
            logger.info(f"partial rollouts at the end of an episode: {metrics}")
        pass_rate = 100 * sum(self._judged) / len(self._judged) if self._judged else None
        return RolloutSamples(samples, self.pool, metrics), pass_rate, self._num_prompts, self._has_ended

    def take_up(self, pool: PartialPool) -> None:
        """Go on with a saved pool; its responses that got no reward, which may have ended the run, are made again."""
        for group in pool.unfinished + pool.complete:
            for response in group.responses:
                if response.outcome is not None and self._read_reward(response.outcome)[1] is not None:
                    pool.restart(response)
        self.pool = pool

    def _version(self) -> int:
        """Weight updates that the engines have loaded."""
        return max(batch_vllm_engine_call(self.vllm_engines, "policy_version"))

    def _start(self, num_groups: int) -> list[Group]:
        """At most so many new groups, as long as there are prompts in this episode."""
        if num_groups <= 0 or self.pool.exhausted:
            return []
        prompts, labels, _, self.pool.exhausted = samples_generator._collect_prompt_batch(self._prompts, num_groups)
        self._num_prompts += len(prompts)
        self.num_prompts += len(prompts)
        size = self.args.rollout.n_samples_per_prompt
        return [self.pool.start(prompt, label, size) for prompt, label in zip(prompts, labels, strict=True)]

    def _grow(self, groups: list[Group], num_needed: int, generate_kwargs: dict) -> None:
        """Let the unfinished responses of all groups grow, until `num_needed` groups of the pool are complete."""
        began, ended = time.time(), []
        running, loads = {}, [0] * len(self.vllm_engines)

        def send(group: Group) -> None:
            engine = loads.index(min(loads))
            responses = group.unfinished
            loads[engine] += len(responses)
            budget = self.args.partial.token_budget
            ref = self._grow_on(self.vllm_engines[engine], group, responses, budget, generate_kwargs)
            running[ref] = engine, group, responses

        for group in groups:
            send(group)
        while running:
            is_enough = len(self.pool.complete) >= num_needed
            if is_enough:
                # Again and again: a request may be on its way to its engine.
                batch_vllm_engine_call(self.vllm_engines, "stop_growing")
            ready, _ = ray.wait(list(running), num_returns=1, timeout=0.1 if is_enough else 10.0)
            for ref in ready:
                engine, group, responses = running.pop(ref)
                loads[engine] -= len(responses)
                pieces = ray.get(ref)
                ended += [piece["ended"] for piece in pieces]
                if not self._note(group, responses, pieces) and not is_enough:
                    for replacement in self._start(1):
                        send(replacement)
        *_, second_last, last = sorted([began, *ended])
        self._seconds_alone += max(0.0, last - second_last)

    def _finish(self, overdue: list[tuple[Group, Response]], generate_kwargs: dict) -> None:
        """End responses where they are, with the rewards that they have then."""
        engine = self.vllm_engines[0]
        refs = [self._grow_on(engine, group, [response], 0, generate_kwargs) for group, response in overdue]
        for (group, response), pieces in zip(overdue, ray.get(refs), strict=True):
            self._note(group, [response], pieces)

    def _grow_on(self, engine, group: Group, responses: list[Response], budget: int, generate_kwargs: dict):
        """Send responses of a group to an engine actor; a reference to what its `grow_responses` returns."""
        sampling_params = samples_generator.SamplingParams(
            temperature=generate_kwargs.get("temperature", 1.0),
            top_p=generate_kwargs.get("top_p", 1.0),
            top_k=generate_kwargs.get("top_k", -1),
            max_tokens=generate_kwargs.get("max_new_tokens"),
            min_tokens=generate_kwargs.get("min_new_tokens", 1),
            skip_special_tokens=generate_kwargs.get("skip_special_tokens", False),
        )
        return engine.grow_responses.remote(
            prompt=(group.key, group.prompt),
            label=group.label,
            sampling_params=sampling_params,
            max_length=generate_kwargs.get("max_len", 2048),
            hf_tokenizer=self.tokenizer,
            kept_tokens={group.responses.index(r): r.tokens.tolist() for r in responses},
            budget=budget,
        )

    def _note(self, group: Group, responses: list[Response], pieces: list[dict]) -> bool:
        """Keep what `responses` of a group grew by; False if the group, now that it is complete, is dropped: it has a
        response without a reward, or dynamic filtering does not let it pass."""
        for response, piece in zip(responses, pieces, strict=True):
            group.prompt_tokens = piece["prompt_tokens"]
            self.pool.grow(response, *(piece[name] for name in ("tokens", "log_probs", "versions", "outcome")))
        if group.unfinished:
            return True
        causes = [cause for response in group.responses if (cause := self._read_reward(response.outcome)[1])]
        if causes:
            self._num_lost += 1
            self._lose(causes[0], self._num_lost, self.args.rollout.batch_size)
            self.pool.drop(group, "unrewarded")
        elif self._passes_filter(group):
            return True
        else:
            self.pool.drop(group, "filtered")
        return False

    def _passes_filter(self, group: Group) -> bool:
        """OpenRLHF's dynamic filtering, of a complete group."""
        scores = [response.outcome["scores"] for response in group.responses]
        if not self.args.algo.dynamic_filtering_enable or None in scores:
            return True
        least, most = self.args.algo.dynamic_filtering_range
        self._judged.append(least < sum(scores) / len(scores) < most)
        return self._judged[-1]

    def _to_experiences(self, group: Group, generate_kwargs: dict) -> list[Experience]:
        """The samples of a complete group, as upstream makes them of what an engine returns."""
        found, prompt = [], group.prompt_tokens
        for response in group.responses:
            tokens = response.tokens.tolist()
            whole = {
                "prompt": group.prompt,
                "label": group.label,
                "observation_tokens": prompt + tokens,
                "action_ranges": [(len(prompt), len(prompt) + len(tokens))],
                "rollout_log_probs": [0.0] * len(prompt) + response.behavior_log_probs.tolist(),
                "versions": [response.versions.tolist()],
                **response.outcome,
            }
            found.append(self._process_response_into_experience(whole, **generate_kwargs))
        return found
