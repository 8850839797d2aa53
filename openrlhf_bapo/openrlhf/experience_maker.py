"""OpenRLHF's RemoteExperienceMaker with the behaviour policy's log-probs, staleness, and replay of past groups."""

from dataclasses import fields

import torch
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from openrlhf_bapo.core.partial_rollouts import PartialPool
from openrlhf_bapo.core.replay_pool import Group, ReplayPool
from openrlhf_bapo.openrlhf.samples_generator import RolloutSamples
from openrlhf_bapo.openrlhf.settings import is_off_policy, replay_config_from_args

# Experience's fields under the pool's names.
_POOL_NAMES = {"sequences": "tokens", "action_log_probs": "behavior_log_probs"}

# Experience's fields that change while a sample lies in the pool.
_AGES = ("staleness", "optimizer_steps")


class OffPolicyExperienceMaker(RemoteExperienceMaker):
    """Upstream's; the ratio's denominator is the policy that really generated the token.

    Fresh samples are made as ever. With `--offpolicy.ratio_base rollout` their denominator is then the engine's own
    log-prob instead of the recomputed one; under a token budget it is so for the tokens of older versions.

    Replayed groups come back as they were made: tokens, denominator, advantages, and whatever else the fresh sample
    had. Advantages are relative to the group's own rewards, reference log-probs belong to a policy that does not
    change, and values and returns (GAE) are those of the rollout's time: computing them anew would pair old rewards
    with a critic that has since learned from them.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.policy_version = 0
        """Weight updates published to the engines so far, those before a resume included."""
        self.version_offset = 0
        """What to add to an engine's own count, which starts at 0 with every run."""
        self.num_optimizer_steps = 0
        """That the actor has made so far, those before a resume included."""
        self.steps_by_version = [0]
        """By policy version: `num_optimizer_steps` of its weights."""
        self.pool = None
        if self.args.replay.ratio:
            self.pool = ReplayPool(replay_config_from_args(self.args.replay))
        self.fresh: list[Experience] = []
        """The last training step's fresh samples, which the rollout statistics describe."""
        self.unfinished: PartialPool | None = None
        """Under a token budget, the pool as it was when the last training step's samples were handed over."""
        self._metrics: dict[str, float] = {}

    @torch.no_grad()
    def make_experience(self, samples_list: list[Experience]) -> list[Experience]:
        """Upstream's forward passes; then staleness, and the ratio's denominator."""
        experiences = super().make_experience(samples_list)
        if is_off_policy(self.args):
            mismatch, num_mixed = [], 0
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
                if self.args.offpolicy.ratio_base == "rollout":
                    if experience.rollout_log_probs is None:
                        raise ValueError(
                            "the agent of --train.agent_func_path returned no rollout_log_probs, which the ratio is "
                            "taken against in async training and with --offpolicy.ratio_base rollout"
                        )
                    experience.action_log_probs = experience.rollout_log_probs * mask
                elif self.args.partial.token_budget:
                    # A resumed response's newest tokens are fresh: the actor has just computed theirs.
                    experience.action_log_probs = torch.where(
                        experience.staleness > 0, experience.rollout_log_probs, experience.action_log_probs
                    )
            self._metrics["offpolicy/mixed_versions"] = num_mixed / sum(len(e.sequences) for e in experiences)
            if sum(gap.numel() for gap in mismatch):
                self._metrics["offpolicy/engine_mismatch"] = torch.cat(mismatch).mean().item()
        return experiences

    @torch.no_grad()
    def make_experience_batch(self, rollout_samples: list[Experience]) -> list[Experience]:
        """Upstream's experience; with replay on, one batch a data-parallel rank with its share of replayed groups."""
        if isinstance(rollout_samples, RolloutSamples):
            self.unfinished = rollout_samples.unfinished
            self._metrics |= rollout_samples.metrics
        self.fresh = super().make_experience_batch(rollout_samples)
        if self.pool is None:
            return self.fresh
        by_index, oldest_by_index = {}, {}
        for experience in self.fresh:
            index = experience.index  # splitting drops it
            oldest = torch.where(experience.action_mask > 0, experience.versions, self.policy_version).amin(-1)
            oldest_by_index |= zip(index, oldest.tolist(), strict=True)
            by_index |= zip(index, split_experience_batch(experience), strict=True)
        samples = remove_padding_in_sequences([by_index[i] for i in sorted(by_index)])
        size = self.args.rollout.n_samples_per_prompt
        groups = [
            _to_group(samples[start : start + size], min(oldest_by_index[i] for i in range(start, start + size)))
            for start in range(0, len(samples), size)
        ]

        replayed = self.pool.sample(self._num_replayed(len(groups)), self.policy_version)
        self.pool.add(groups)  # after the draw: a group is not replayed beside itself
        for group in replayed:
            samples += [self._from_pool(sample) for sample in group.samples]
        # A batch's samples must log the same; after a resume the reward may log more than the pool's groups know.
        names = [set(sample.info) for sample in samples]
        common, logged = set.intersection(*names), set.union(*names)
        self._metrics["replay/logs_dropped"] = float(len(logged - common))
        for sample in samples:
            sample.info = {name: value for name, value in sample.info.items() if name in common}

        num_ranks = self.args.actor.num_nodes * self.args.actor.num_gpus_per_node
        num_ranks //= self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size
        # Upstream trains whole micro-batches, under dynamic batch whole optimizer steps. Only a short last rollout
        # leaves a rest.
        train = self.args.train
        unit = train.batch_size if train.dynamic_batch_enable else train.micro_batch_size * num_ranks
        self._metrics["replay/samples_dropped"] = float(len(samples) % unit)
        samples = samples[: len(samples) // num_ranks * num_ranks]  # every rank must make as many optimizer steps
        return [make_experience_batch(samples[rank::num_ranks]) for rank in range(num_ranks)]

    def count_version(self) -> None:
        """The actor's weights have been published to the engines."""
        self.policy_version += 1
        self.steps_by_version.append(self.num_optimizer_steps)

    def _note_age(self, experience: Experience) -> None:
        """Fill in staleness and optimizer steps, which follow from the versions."""
        active, versions = experience.action_mask > 0, experience.versions
        experience.staleness = torch.where(active, self.policy_version - versions, 0).int()
        behind = self.num_optimizer_steps - torch.tensor(self.steps_by_version)[versions]
        experience.optimizer_steps = torch.where(active, behind, 0).int()

    def metrics(self) -> dict[str, float]:
        """What is to be logged of the last training step's experience."""
        metrics, self._metrics = self._metrics, {}
        return metrics if self.pool is None else metrics | self.pool.metrics()

    def _num_replayed(self, num_fresh: int) -> int:
        """Groups to draw: as many as are asked for and there, so that the batch ends with a full optimizer step."""
        self.pool.sample(0, self.policy_version)  # drops what is too old
        most = min(round(self.args.replay.ratio * num_fresh), len(self.pool))
        size, batch_size = self.args.rollout.n_samples_per_prompt, self.args.train.batch_size
        fits = (n for n in range(most, -1, -1) if (num_fresh + n) * size % batch_size == 0)
        return next(fits, most)

    def _from_pool(self, sample: dict[str, torch.Tensor]) -> Experience:
        values = {"info": {}, "prompts": [""], "labels": [""], "images": [None], "mm_train_inputs": [None]}
        for name, tensor in sample.items():
            if name.startswith("info."):
                values["info"][name.removeprefix("info.")] = tensor
            else:
                values[name] = tensor
        for field, name in _POOL_NAMES.items():
            values[field] = values.pop(name)
        values["sequences"] = values["sequences"].long()
        values["action_mask"] = values["action_mask"].long()
        values["attention_mask"] = torch.ones_like(values["sequences"])
        experience = Experience(**values)
        self._note_age(experience)
        return experience


def _to_group(samples: list[Experience], oldest_version: int) -> Group:
    """A prompt's fresh samples as the pool keeps them: every tensor of the experience, under its name."""
    kept = []
    for sample in samples:
        tensors = {f.name: getattr(sample, f.name) for f in fields(Experience) if f.name not in _AGES}
        tensors = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        for field, name in _POOL_NAMES.items():
            tensors[name] = tensors.pop(field)
        del tensors["attention_mask"]  # all ones, since the padding is gone
        tensors |= {f"info.{name}": torch.as_tensor(value) for name, value in sample.info.items()}
        kept.append(tensors)
    rewards = torch.stack([sample.rewards for sample in samples])
    return Group(kept, rewards, known_oldest_version=oldest_version)
