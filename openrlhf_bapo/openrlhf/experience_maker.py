"""OpenRLHF's RemoteExperienceMaker with the behavior policy's log-probs, staleness, and replay of past groups."""

import itertools
import math
from dataclasses import replace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils import experience_maker as upstream
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size

from openrlhf_bapo.offpolicy.partial_rollouts import PartialPool
from openrlhf_bapo.offpolicy.replay_pool import Group, ReplayPool
from openrlhf_bapo.openrlhf.sample_buffer import SampleBuffer, to_fields, to_tensors
from openrlhf_bapo.openrlhf.samples_generator import RolloutSamples
from openrlhf_bapo.openrlhf.settings import (
    compares_engine,
    is_decoupled,
    is_off_policy,
    is_tapered,
    replay_config_from_args,
)

# Fields of Experience that have another name in the pool. OpenRLHF's loss takes action_log_probs as the denominator of
# the ratio, so they are the behavior policy's.
_POOL_NAMES = {"sequences": "tokens", "action_log_probs": "behavior_log_probs"}

_CENTERED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")
"""Advantage estimators that subtract a mean of rewards."""

# Fields of Experience that change while a sample is in the pool, and one that is all ones without padding.
_NOT_KEPT = ("staleness", "optimizer_steps", "attention_mask")


class OffPolicyExperienceMaker(RemoteExperienceMaker):
    """Upstream's experience maker, with log-probs of the policy that generated each token as the ratio's denominator.

    Fresh samples are made as upstream does. With `--offpolicy.ratio_base rollout` the engine's log-probs then replace
    the recomputed ones in the denominator. With `auto` they do so for tokens of older versions.

    Replayed groups come back as they were made, with the same tokens, denominators, advantages and other tensors.
    Advantages are relative to the group's own rewards, and the reference policy does not change. Values and returns
    (GAE) stay those of the rollout: new values would come from a critic that has since learned from these rewards.
    With `--offpolicy.objective decoupled` their denominators are recomputed too, by one forward pass of the actor. The
    pool then keeps the engine's log-probs as denominators.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy_version = 0
        """Weight updates published to the engines so far, including those before a resume."""
        self.version_offset = 0
        """Policy version minus the engines' own count of updates, which starts at 0 with every run."""
        self.num_optimizer_steps = 0
        """Optimizer steps of the actor so far, including those before a resume."""
        self.steps_by_version = [0]
        """For each policy version, `num_optimizer_steps` when it was published."""
        self.pool: ReplayPool | None = None
        if self.args.replay.ratio:
            self.pool = ReplayPool(replay_config_from_args(self.args.replay))
        self.fresh: list[Experience] = []
        """Fresh samples of the last training step, for the rollout statistics."""
        self.unfinished: PartialPool | None = None
        """Under a token budget, the pool of unfinished responses after the last training step's rollout."""
        self.buffer: SampleBuffer | None = None
        """Samples that wait for later training steps after the last training step's rollout."""
        self._metrics: dict[str, float] = {}
        self._has_clipped = False

    @torch.no_grad()
    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """Run upstream's forward passes, then set staleness and the ratio's denominator."""
        experiences = super().make_experience(samples_list)
        if is_off_policy(self.args):
            mismatch, num_mixed, base = [], 0, self.args.offpolicy.ratio_base
            for experience in experiences:
                mask = experience.action_mask
                experience.versions = torch.where(mask > 0, experience.versions + self.version_offset, 0)
                self._note_age(experience)
                newest = torch.where(mask > 0, experience.versions, -1).amax(-1)
                num_mixed += int(((experience.versions != newest[:, None]) & (mask > 0)).any(-1).sum())
                if experience.rollout_log_probs is not None:
                    gap = (experience.rollout_log_probs - experience.action_log_probs).abs()
                    mismatch.append(gap[(mask > 0) & (experience.staleness == 0)])
                if self.pool is None:
                    experience.start_log_probs = experience.action_log_probs
                if compares_engine(self.args) and experience.rollout_log_probs is None:
                    raise ValueError(
                        "the agent of --train.agent_func_path returned no rollout_log_probs, which the ratio or its "
                        "correction needs (in async training, with --offpolicy.ratio_base rollout, "
                        "--offpolicy.weight, --bapo.token_weight or --algo.advantage.is_correction_level); "
                        "--policy_loss ppo runs without them if it is given --offpolicy.ratio_base recomputed"
                    )
                if is_tapered(self.args):
                    # The mismatch of engine and actor does not count as staleness: fresh tokens have s = 1.
                    experience.rollout_log_probs = torch.where(
                        experience.staleness > 0, experience.rollout_log_probs, experience.action_log_probs
                    )
                if base == "rollout":
                    experience.action_log_probs = experience.rollout_log_probs * mask
                elif base == "auto":
                    # The newest tokens of a resumed response are fresh, and keep the log-probs of the actor.
                    experience.action_log_probs = torch.where(
                        experience.staleness > 0, experience.rollout_log_probs, experience.action_log_probs
                    )
            self._metrics["offpolicy/mixed_versions"] = num_mixed / sum(len(e.sequences) for e in experiences)
            if sum(gap.numel() for gap in mismatch):
                self._metrics["offpolicy/engine_mismatch"] = torch.cat(mismatch).mean().item()
        return experiences

    def compute_advantages_and_returns(self, experiences: list[Experience]) -> list[Experience]:
        """Compute upstream's advantages, with a shaped reward of exactly 0 where a group's rewards are all equal.

        In float32 the mean of eight rewards of 0.7 is not 0.7. Upstream's group_norm divides the difference of 6e-8 by
        0 + 1e-9, so that all eight responses get an advantage of 60.
        """
        is_centered = self.args.algo.advantage.estimator in _CENTERED
        compute_reward, places = upstream.compute_reward, itertools.count()
        equal: list[torch.Tensor] = []

        def compute_shaped_reward(rewards: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            # Upstream calls this for one experience after another, after the length penalties.
            if is_centered:
                equal.extend(() if equal else self._have_equal_rewards(experiences))
                rewards = torch.where(equal[next(places)], 0.0, rewards)
            self._warn_of_clipped(rewards)
            return compute_reward(rewards, *args, **kwargs)

        upstream.compute_reward = compute_shaped_reward
        try:
            return super().compute_advantages_and_returns(experiences)
        finally:
            upstream.compute_reward = compute_reward

    def _warn_of_clipped(self, rewards: torch.Tensor) -> None:
        """Warn once of rewards, less their baseline, that OpenRLHF clips; its default makes 20 of 100 points 10."""
        low, high = self.args.reward.clip_range
        clipped = rewards[(rewards < low) | (rewards > high)]
        if len(clipped) and not self._has_clipped:
            self._has_clipped = True
            print(
                f"openrlhf-bapo: warning: --reward.clip_range {low:g} {high:g}: clips a reward, less its baseline, of "
                f"{clipped[0].item():g}; usual: smaller rewards, or a wider range",
                flush=True,
            )

    def _have_equal_rewards(self, experiences: list[Experience]) -> list[torch.Tensor]:
        """Say for each sample whether its estimator's baseline is a mean of equal rewards; note how many groups are."""
        rewards = torch.cat([experience.rewards for experience in experiences])
        order = torch.tensor([index for experience in experiences for index in experience.index])
        in_order = torch.empty_like(rewards)
        in_order[order] = rewards
        is_over_all = self.args.algo.advantage.estimator == "flash_reinforce"
        size = len(rewards) if is_over_all else self.args.rollout.n_samples_per_prompt
        groups = in_order.view(-1, size)
        is_equal = (groups == groups[:, :1]).all(-1)
        self._metrics["rollout/equal_reward_groups"] = float(is_equal.sum())
        sizes = [len(experience.rewards) for experience in experiences]
        return list(is_equal.repeat_interleave(size)[order].split(sizes))

    def get_advantages_and_returns(
        self, values: torch.Tensor, rewards: torch.Tensor, action_mask: torch.Tensor, gamma: float, lambd: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return upstream's advantages and returns (GAE), whose steps are the generated tokens alone.

        Upstream takes the tokens between an agent's actions for steps too, with values of 0. With `lambd` below 1 they
        then separate an action from the rewards and the values after it.

        All tensors are [batch, actions], and `action_mask` is 1 for generated tokens. The results equal upstream's bit
        for bit at each token of a response without gaps.
        """
        order, packed = _generated_first(action_mask, values, rewards, action_mask)
        advantages, returns = super().get_advantages_and_returns(*packed, gamma, lambd)
        return advantages.scatter(-1, order, advantages), returns.scatter(-1, order, returns)

    def get_cumulative_returns(self, rewards: torch.Tensor, action_mask: torch.Tensor, gamma: float) -> torch.Tensor:
        """Return upstream's returns, bit for bit. Without a discount, this needs no Python loop over the tokens.

        With one, the generated tokens alone are steps, as in `get_advantages_and_returns`. All tensors are
        [batch, actions], on the CPU.
        """
        if gamma != 1:
            order, packed = _generated_first(action_mask, rewards, action_mask)
            returns = super().get_cumulative_returns(*packed, gamma)
            return returns.scatter(-1, order, returns)
        # Upstream adds to 0.0, which turns -0.0 into 0.0, in at least float32. torch.cumsum would add in float64.
        dtype = torch.promote_types(rewards.dtype, torch.float32)
        backwards = (0.0 + action_mask * rewards).to(dtype).flip(-1).numpy()
        return torch.from_numpy(backwards.cumsum(-1)).flip(-1).to(rewards.dtype)

    @torch.no_grad()
    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Make upstream's experience. With replay, add the replayed groups.

        With replay, return one batch per rank, or with dynamic batches one per sample.
        """
        if isinstance(rollout_samples, RolloutSamples):
            self.unfinished, self.buffer = rollout_samples.unfinished, rollout_samples.buffer
            self._metrics |= rollout_samples.metrics
        self._metrics |= _take_uncommon_logs(rollout_samples)
        self.fresh = super().make_experience_batch(rollout_samples)
        if self.pool is None:
            return self.fresh
        by_index: dict[int, Experience] = {}
        for experience in self.fresh:
            index = experience.index  # read here, because splitting drops it
            by_index |= zip(index, split_experience_batch(experience), strict=True)
        samples = remove_padding_in_sequences([by_index[i] for i in sorted(by_index)])
        size = self.args.rollout.n_samples_per_prompt
        kept, num_fresh = samples, len(samples)
        if is_decoupled(self.args):
            kept = [replace(sample, action_log_probs=sample.rollout_log_probs) for sample in samples]
        groups = [_to_group(kept[start : start + size]) for start in range(0, num_fresh, size)]

        replayed = self.pool.sample(self._num_replayed(self.pool, len(groups)), self.policy_version)
        self.pool.add(groups)  # after the draw, so that fresh groups are not drawn at once
        for group in replayed:
            samples += [self._from_pool(sample) for sample in group.samples]
        # All samples of a batch must log the same names. After a resume, the reward may log more than the pool has.
        names = [set(sample.info) for sample in samples]
        common, logged = set.intersection(*names), set.union(*names)
        self._metrics["replay/logs_dropped"] = float(len(logged - common))
        for sample in samples:
            sample.info = {name: value for name, value in sample.info.items() if name in common}

        num_ranks = self.args.actor.num_nodes * self.args.actor.num_gpus_per_node
        gpus_per_sample = self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size
        num_ranks //= gpus_per_sample
        if is_decoupled(self.args) and replayed:
            self._recompute_denominators(samples[num_fresh:], num_ranks)
        # Whole optimizer steps, as in `VersionedSamplesGenerator.generate_samples`. Only a short last rollout leaves a
        # remainder.
        num_left_over = len(samples) % self.args.train.batch_size
        self._metrics["replay/samples_dropped"] = float(num_left_over)
        samples = samples[: len(samples) - num_left_over]
        if gpus_per_sample > 1:  # upstream does not shuffle then
            samples = _interleaved(samples[:num_fresh], samples[num_fresh:])
        parts = [samples[rank::num_ranks] for rank in range(num_ranks)]
        if self.args.train.dynamic_batch_enable:
            # Upstream's `balance_experiences` splits all batches again. One sample per batch needs no padding.
            parts = [[sample] for part in parts for sample in part]
        return [make_experience_batch(part) for part in parts]

    def _recompute_denominators(self, samples: list[Experience], num_ranks: int) -> None:
        """Let the actor compute the log-probs of replayed samples with its current weights, as it did for fresh ones.

        Every rank runs the same number of forward passes, over micro-batches of similar total length.
        """
        args = self.args
        longest_first = sorted(samples, key=lambda sample: int(sample.total_length), reverse=True)
        num_batches = math.ceil(len(samples) / args.rollout.micro_batch_size)
        if args.train.dynamic_batch_enable:
            sizes = args.rollout.max_tokens_per_gpu, args.ds.ring_attn_size, args.ds.tensor_parallel_size
            lengths = [int(sample.total_length) for sample in longest_first]
            num_batches = get_minimum_num_micro_batch_size(lengths, *sizes)
        num_batches = math.ceil(num_batches / num_ranks) * num_ranks
        parts = [longest_first[i::num_batches] or longest_first[:1] for i in range(num_batches)]
        batches = [make_experience_batch(part) for part in parts]
        refs = self._dispatch_forward(
            self.actor_model_group,
            args.train.colocate_all or args.train.colocate_actor_ref,
            sequences=[batch.sequences for batch in batches],
            action_mask=[batch.action_mask for batch in batches],
            attention_mask=[batch.attention_mask for batch in batches],
        )
        found = self._flatten_results(refs, args.ds.ring_attn_size * args.ds.tensor_parallel_size)
        for part, log_probs in zip(parts, found, strict=True):
            for sample, row in zip(part, log_probs, strict=True):
                sample.action_log_probs = row[: len(sample.action_mask)]  # padded on the right

    def count_version(self) -> None:
        """Note that the actor's weights were published to the engines."""
        self.policy_version += 1
        self.steps_by_version.append(self.num_optimizer_steps)

    def _note_age(self, experience: Experience) -> None:
        """Set `staleness` and `optimizer_steps`, which follow from `versions`."""
        active, versions = experience.action_mask > 0, experience.versions
        experience.staleness = torch.where(active, self.policy_version - versions, 0).int()
        behind = self.num_optimizer_steps - torch.tensor(self.steps_by_version)[versions]
        experience.optimizer_steps = torch.where(active, behind, 0).int()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last training step's experience."""
        metrics, self._metrics = self._metrics, {}
        return metrics if self.pool is None else metrics | self.pool.metrics()

    def _num_replayed(self, pool: ReplayPool, num_fresh: int) -> int:
        """Return how many groups to draw: as many as asked for and available, in whole optimizer steps if possible."""
        pool.sample(0, self.policy_version)  # drops expired groups
        most = min(round(self.args.replay.ratio * num_fresh), len(pool))
        size, batch_size = self.args.rollout.n_samples_per_prompt, self.args.train.batch_size
        fits = (n for n in range(most, -1, -1) if (num_fresh + n) * size % batch_size == 0)
        return next(fits, most)

    def _from_pool(self, sample: dict[str, torch.Tensor]) -> Experience:
        values = to_fields(sample)
        for field, name in _POOL_NAMES.items():
            values[field] = values.pop(name)
        values["sequences"] = values["sequences"].long()
        values["action_mask"] = values["action_mask"].long()
        values["attention_mask"] = torch.ones_like(values["sequences"])
        experience = Experience(**values)
        self._note_age(experience)
        return experience


def _generated_first(action_mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return an order of the tokens in which generated ones come first, [batch, actions], and tensors in that order."""
    order = (action_mask == 0).sort(dim=-1, stable=True).indices
    return order, [tensor.gather(-1, order) for tensor in tensors]


def _take_uncommon_logs(samples: list[Experience]) -> dict[str, float]:
    """Take out what the reward or the agent logs for some samples only, and return the mean over those by name.

    Upstream counts the other samples as 0, or drops the name. Its ranks then add up different metrics.
    """
    values: dict[str, list[torch.Tensor]] = {}
    for sample in samples:
        for name, value in sample.info.items():
            values.setdefault(name, []).append(value)
    uncommon = {name: found for name, found in values.items() if len(found) < len(samples)}
    for sample in samples:
        sample.info = {name: value for name, value in sample.info.items() if name not in uncommon}
    return {name: torch.cat(found).float().mean().item() for name, found in uncommon.items()}


def _interleaved(fresh: list[Experience], replayed: list[Experience]) -> list[Experience]:
    """Return both lists as one in which they are spread evenly, each in its order."""
    placed = [(i / len(part), sample) for part in (fresh, replayed) for i, sample in enumerate(part)]
    return [sample for _, sample in sorted(placed, key=lambda pair: pair[0])]


def _to_group(samples: list[Experience]) -> Group:
    """Convert the fresh samples of a prompt for the pool, with every tensor of the experience."""
    kept = []
    for sample in samples:
        tensors = {name: tensor for name, tensor in to_tensors(sample).items() if name not in _NOT_KEPT}
        for field, name in _POOL_NAMES.items():
            tensors[name] = tensors.pop(field)
        kept.append(tensors)
    return Group(kept, torch.stack([sample.rewards for sample in samples]))
