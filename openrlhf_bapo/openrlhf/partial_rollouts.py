"""Rollouts under a token budget, and rollouts that are trained on later.

Under a token budget (`--partial.token_budget`), responses continue in later rollouts. With `--offpolicy.lag` N no
response is cut, and complete groups wait for N rollouts before they are trained on.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils import samples_generator
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.logging_utils import init_logger

from openrlhf_bapo.offpolicy.partial_rollouts import Group, PartialPool, Response
from openrlhf_bapo.openrlhf.reward_calls import RewardFault
from openrlhf_bapo.openrlhf.samples_generator import RolloutSamples, VersionedSamplesGenerator
from openrlhf_bapo.openrlhf.settings import partial_config_from_args
from openrlhf_bapo.openrlhf.vllm_engine import Piece, PlacedPrompt

logger = init_logger(__name__)


def make_samples_generator(strategy: Any, *args: Any, **kwargs: Any) -> VersionedSamplesGenerator:
    """Make the generator that the flags ask for. OpenRLHF calls this in place of its own class."""
    kind = PartialSamplesGenerator if strategy.args.partial.token_budget else VersionedSamplesGenerator
    return kind(strategy, *args, **kwargs)


@dataclass
class _Call:
    """A call of `grow_responses` under way."""

    engine: int
    """Number of the engine that executes it."""
    group: Group
    responses: list[Response]


class PartialSamplesGenerator(VersionedSamplesGenerator):
    """Generates rollouts in which a response grows by at most `--partial.token_budget` tokens.

    A rollout resumes the unfinished groups, and starts as many new ones as `--partial.oversample` asks for. It ends as
    soon as a training batch of groups is complete. Responses under way then stop, and continue in the next rollout. If
    all responses spend their budget before that, another rollout follows at once, with the same weights.

    With `--offpolicy.lag` N, a rollout returns the groups that were generated N rollouts ago. The first rollout
    generates N batches more. At the end of the data, the waiting groups are returned without another rollout.

    Evaluation is upstream's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pool = PartialPool(partial_config_from_args(self.args.partial))
        self._prompts: Iterator | None = None
        self._has_ended = False  # whether the end of the episode has been reported
        # About the current rollout; `generate_samples` resets them.
        self.num_drawn = 0  # prompts
        self._num_lost = 0  # groups dropped without a reward
        self._judged: list[bool] = []  # for each group that dynamic filtering judged, whether it passed
        self._seconds_alone = 0.0  # time in which a single call was still growing responses

    @torch.no_grad()
    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """Generate the samples of one training step. The batch is shorter only at the end of the data.

        Returns:
            As upstream: the samples; the percentage of groups that passed dynamic filtering; the number of prompts
            drawn; whether the episode has ended.
        """
        if self._has_ended:
            self._prompts, self.pool.exhausted, self._has_ended = None, False, False
        if self._prompts is None and not self.pool.exhausted:
            self._prompts = iter(self.prompts_dataloader)
        began, num_taken = time.time(), self.args.rollout.batch_size
        num_needed = num_taken * (1 + self.args.offpolicy.lag)
        self._seconds_alone, self.num_drawn, self._num_lost, self._judged = 0.0, 0, 0, []
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
        metrics |= self._fault_metrics(samples)
        for reason in ("stale", "filtered", "left_over"):
            self.untrained[reason] += int(metrics[f"partial/dropped_{reason}"])
        if not samples:
            logger.info(f"partial rollouts at the end of an episode: {metrics}")
        pass_rate = 100 * sum(self._judged) / len(self._judged) if self._judged else None
        return RolloutSamples(samples, metrics, self.pool), pass_rate, self.num_drawn, self._has_ended

    def take_up(self, pool: PartialPool) -> None:
        """Continue with a saved pool. Responses without a reward, which may have ended the run, are generated again."""
        for group in pool.unfinished + pool.complete:
            for response in group.responses:
                if response.outcome is not None and self._reward_fault(response.outcome) is not None:
                    pool.restart(response)
        self.pool = pool

    def begin_other_prompts(self) -> None:
        """Draw prompts too, beside the responses that are unfinished."""
        self.pool.exhausted = False

    def _version(self) -> int:
        """Return the number of weight updates that the engines have loaded."""
        return max(batch_vllm_engine_call(self.vllm_engines, "num_weight_updates"))

    def _start(self, num_groups: int) -> list[Group]:
        """Start up to `num_groups` new groups, fewer if the episode has no more prompts."""
        if num_groups <= 0 or self.pool.exhausted:
            return []
        prompts, labels, _, self.pool.exhausted = samples_generator._collect_prompt_batch(self._prompts, num_groups)
        self.num_drawn += len(prompts)
        self.num_prompts += len(prompts)
        size = self.args.rollout.n_samples_per_prompt
        return [self.pool.start(prompt, label, size) for prompt, label in zip(prompts, labels, strict=True)]

    def _grow(self, groups: list[Group], num_needed: int, generate_kwargs: dict) -> None:
        """Let the unfinished responses of `groups` grow until `num_needed` groups of the pool are complete."""
        began, ended = time.time(), []
        running: dict[ray.ObjectRef, _Call] = {}
        loads = [0] * len(self.vllm_engines)  # responses that grow on each engine
        num_complete = len(self.pool.complete)  # counted, because the pool sorts its groups each time

        def send(group: Group) -> None:
            engine = loads.index(min(loads))
            responses = group.unfinished
            loads[engine] += len(responses)
            ref = self._grow_on(self.vllm_engines[engine], group, responses, generate_kwargs)
            running[ref] = _Call(engine, group, responses)

        for group in groups:
            send(group)
        while running:
            is_enough = num_complete >= num_needed
            if is_enough:
                # Repeated, because a request may still be on its way to its engine.
                batch_vllm_engine_call(self.vllm_engines, "stop_growing")
            ready, _ = ray.wait(list(running), num_returns=1, timeout=0.1 if is_enough else 10.0)
            for ref in ready:
                call = running.pop(ref)
                loads[call.engine] -= len(call.responses)
                pieces = ray.get(ref)
                ended += [piece.ended_at for piece in pieces]
                if self._keep(call.group, call.responses, pieces):
                    num_complete += not call.group.unfinished
                elif not is_enough:
                    for replacement in self._start(1):
                        send(replacement)
        *_, second_last, last = sorted([began, *ended])
        self._seconds_alone += max(0.0, last - second_last)

    def _finish(self, overdue: list[tuple[Group, Response]], generate_kwargs: dict) -> None:
        """End responses where they are, as truncated, and get their rewards."""
        engine = self.vllm_engines[0]
        refs = [self._grow_on(engine, group, [response], generate_kwargs, finish=True) for group, response in overdue]
        for (group, response), pieces in zip(overdue, ray.get(refs), strict=True):
            self._keep(group, [response], pieces)

    def _grow_on(
        self, engine: Any, group: Group, responses: list[Response], generate_kwargs: dict, finish: bool = False
    ) -> ray.ObjectRef:
        """Call `grow_responses` of an engine actor for responses of a group; return Ray's reference to the pieces."""
        sampling_params = samples_generator.SamplingParams(
            temperature=generate_kwargs.get("temperature", 1.0),
            top_p=generate_kwargs.get("top_p", 1.0),
            top_k=generate_kwargs.get("top_k", -1),
            max_tokens=generate_kwargs.get("max_new_tokens"),
            min_tokens=generate_kwargs.get("min_new_tokens", 1),
            skip_special_tokens=generate_kwargs.get("skip_special_tokens", False),
        )
        return engine.grow_responses.remote(
            prompt=PlacedPrompt(group.key, group.prompt),
            label=group.label,
            sampling_params=sampling_params,
            max_length=generate_kwargs.get("max_len", 2048),
            hf_tokenizer=self.tokenizer,
            kept_tokens={group.responses.index(r): r.tokens.tolist() for r in responses},
            budget=self.args.partial.token_budget,
            finish=finish,
        )

    def _keep(self, group: Group, responses: list[Response], pieces: list[Piece]) -> bool:
        """Append the pieces to their responses, and drop the group if it is complete but must not be trained on.

        Returns:
            False if the group was dropped: a response has no reward, or dynamic filtering rejects the group.
        """
        for response, piece in zip(responses, pieces, strict=True):
            group.prompt_tokens = piece.prompt_tokens
            self.pool.grow(response, piece.tokens, piece.behavior_log_probs, piece.versions, piece.outcome)
        if group.unfinished:
            return True
        faults = [fault for outcome in group.outcomes if (fault := self._reward_fault(outcome))]
        if faults:
            self._num_lost += 1
            self._lose(faults[0], self._num_lost, self.args.rollout.batch_size * (1 + self.args.offpolicy.lag))
            self.pool.drop(group, "unrewarded")
        elif self._passes_filter(group):
            return True
        else:
            self.pool.drop(group, "filtered")
        return False

    def _reward_fault(self, outcome: dict) -> RewardFault | None:
        """Return why a complete response has no reward; None if it has one."""
        try:
            self._read_reward(outcome)
        except RewardFault as fault:
            return fault
        return None

    def _passes_filter(self, group: Group) -> bool:
        """Return whether a complete group passes OpenRLHF's dynamic filtering."""
        scores = [outcome["scores"] for outcome in group.outcomes]
        if not self.args.algo.dynamic_filtering_enable or None in scores:
            return True
        least, most = self.args.algo.dynamic_filtering_range
        self._judged.append(least < sum(scores) / len(scores) < most)
        return self._judged[-1]

    def _to_experiences(self, group: Group, generate_kwargs: dict) -> list[Experience]:
        """Return the samples of a complete group, made by upstream's conversion of an engine's responses."""
        found, prompt = [], group.prompt_tokens
        for response, outcome in zip(group.responses, group.outcomes, strict=True):
            tokens = response.tokens.tolist()
            whole = {
                "prompt": group.prompt,
                "label": group.label,
                "observation_tokens": prompt + tokens,
                "action_ranges": [(len(prompt), len(prompt) + len(tokens))],
                "rollout_log_probs": [0.0] * len(prompt) + response.behavior_log_probs.tolist(),
                "versions": [response.versions.tolist()],
                **outcome,
            }
            found.append(self._process_response_into_experience(whole, **generate_kwargs))
        return found
