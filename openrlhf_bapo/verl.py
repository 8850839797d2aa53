"""BAPO in verl: the policy loss "bapo", whose clip bounds are found for each optimizer step (written for verl 0.9.1).

    actor_rollout_ref.actor.policy_loss._target_=openrlhf_bapo.verl.BapoPolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=bapo
    +actor_rollout_ref.actor.policy_loss.preset=paper

verl makes that config in every worker before the worker's engine, and so imports this module there, which registers
loss and engine. The engine runs the optimizer step's micro-batches once without gradient, in which the loss only
tallies; the tallies of all data-parallel ranks give the bounds; then comes verl's own optimizer step, in which the loss
is verl's own between these bounds.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from openrlhf_bapo.core.bounds_metrics import bounds_metrics
from openrlhf_bapo.core.clip_bounds import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    solve_clip_bounds,
    tally_contributions,
)
from openrlhf_bapo.core.steady_bounds import SmoothingConfig, SteadyBounds

SCOPES = ("update", "micro_batch")
VENDOR = "bapo"
"""What verl is told to take engines of; where there is none of it, verl takes its own."""

_BESIDE_PRESET = {"released": {"scope": "micro_batch"}, "steady": {"smoothing": {"half_life": 20.0}}}
# Two presets have a dual clip of 3, which is verl's default, `clip_ratio_c`.


@dataclass
class BapoPolicyLossConfig(PolicyLossConfig):
    """verl's `PolicyLossConfig` with BAPO's settings; verl's `clip_ratio_low` and `clip_ratio_high` have no effect.

    Raises:
        ValueError: for a setting that is not allowed.
    """

    preset: str = "readme"
    """Of `ClipConfig.preset`."""

    search: dict = field(default_factory=dict)
    """Fields of `ClipConfig`, instead of the preset's."""

    smoothing: dict | None = None
    """Fields of `SmoothingConfig`: the bounds follow the optimizer steps before and need no forward of their own."""

    scope: str | None = None
    """Whose tokens a search sees, an "update"'s or a "micro_batch"'s; None: the preset's, else "update"."""

    def __post_init__(self) -> None:
        if self.loss_mode != "bapo":
            raise ValueError(
                f"policy_loss.loss_mode {self.loss_mode!r} is not allowed with BAPO's config; set it to bapo"
            )
        preset = _BESIDE_PRESET.get(self.preset, {})
        smoothing, scope = self.smoothing or preset.get("smoothing"), self.scope or preset.get("scope", "update")
        if scope not in SCOPES:
            raise ValueError(f"policy_loss.scope {scope!r} is not allowed; it must be one of {', '.join(SCOPES)}")
        config = replace(ClipConfig.preset(self.preset), **self.search)
        steady = SteadyBounds(config, SmoothingConfig(**smoothing)) if smoothing else None
        self.update = _Update(config, steady, scope)
        os.environ.setdefault("VERL_ENGINE_VENDOR", VENDOR)
        print(f"openrlhf-bapo: verl's policy loss is bapo, scope {scope}, smoothing {smoothing}, {config}", flush=True)


class _Update:
    """The running optimizer step: what the engine and the loss share."""

    def __init__(self, config: ClipConfig, steady: SteadyBounds | None, scope: str) -> None:
        self.config = config
        self.steady = steady
        self.scope = scope
        self.group: dist.ProcessGroup | None = None  # None: no step is running
        self.is_searching = False
        self.tallies: list[ContributionTally] = []
        self.used: list[ClipBounds] = []

    def bounds(self, *tokens: torch.Tensor) -> ClipBounds | SteadyBounds:
        """Those that a micro-batch is trained with, of which these are ratio, advantages and weights."""
        if self.steady is not None:
            self.tallies.append(self.steady.tally(*tokens))
            return self.steady
        if self.scope == "micro_batch":
            self.tallies.append(tally_contributions(*tokens, self.config))
            self.search()
        return self.used[-1]

    def search(self) -> None:
        self.used.append(solve_clip_bounds(self.reduced(), self.config))

    def reduced(self) -> ContributionTally:
        """The sum of the tallies, over all data-parallel ranks."""
        tallies, self.tallies = self.tallies, []
        return ContributionTally(sum(tally.sums for tally in tallies)).all_reduce(self.group)


@register_policy_loss("bapo")
def compute_policy_loss_bapo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's `compute_policy_loss_vanilla` between BAPO's bounds; the same arguments and results.

    Dual clip, rollout correction and aggregation are verl's own. Raises RuntimeError without BAPO's engine.
    """
    update = config.policy_loss.update
    if update.group is None:
        vendor = os.environ.get("VERL_ENGINE_VENDOR")
        raise RuntimeError(
            f"policy loss bapo needs strategy fsdp or fsdp2, and VERL_ENGINE_VENDOR {VENDOR}, not {vendor}"
        )
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()  # as verl's
    weight = response_mask
    if loss_agg_mode == "seq-mean-token-mean" and update.config.target_kind == "share":  # as with OpenRLHF
        weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
    if update.is_searching:
        update.tallies.append(tally_contributions(ratio, advantages, weight, update.config))
        return log_prob.new_zeros(()), {}
    bounds = update.bounds(ratio, advantages, weight)
    # Past the config's refusal to be changed.
    vars(config).update(clip_ratio_low=1 - bounds.lower.item(), clip_ratio_high=bounds.upper.item() - 1)
    return compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=VENDOR)
class BapoFSDPEngine(FSDPEngineWithLMHead):
    """verl's engine, whose optimizer step begins with the search; logs `bounds_metrics` of each."""

    def train_batch(self, data: TensorDict, loss_function: Callable) -> dict:
        update: _Update = loss_function.keywords["config"].policy_loss.update
        update.group = self.get_data_parallel_group()
        if update.steady is None and update.scope == "update":
            update.is_searching = True
            self.infer_batch(data, loss_function)
            update.is_searching = False
            update.search()
        outputs = super().train_batch(data, loss_function)
        (used, update.used), found = (update.used, []), None
        if update.steady is not None:
            used, found = ([bounds] for bounds in update.steady.end_update(update.reduced()))
        update.group = None
        outputs["metrics"] |= {name: [value] for name, value in bounds_metrics(used, found).items()}
        return outputs
