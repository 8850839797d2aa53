"""BAPO in verl: the policy loss "bapo", with a clip rule that bounds each optimizer step (written for verl 0.9.1).

    actor_rollout_ref.actor.policy_loss._target_=openrlhf_bapo.verl.BapoPolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=bapo
    +actor_rollout_ref.actor.policy_loss.preset=paper

Each worker makes that config before its engine. This imports the module, which registers loss and engine. For a search,
the engine runs the optimizer step's micro-batches once without gradient, and the loss only tallies them. The tallies of
all data-parallel ranks give the bounds. Then verl makes its own optimizer step between these bounds.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, register_policy_loss
from verl.utils.torch_functional import masked_mean
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from openrlhf_bapo.rules.clip_config import DEFAULT_PRESET, ClipConfig, SmoothingConfig
from openrlhf_bapo.rules.clip_rules import ClipRule, Tokens, make_clip_rule, share_weights
from openrlhf_bapo.rules.other_rules import RULES, default_settings, make_rule
from openrlhf_bapo.rules.own_rules import installed_rules, is_own_rule, located
from openrlhf_bapo.rules.rule_loss import RuleUpdates
from openrlhf_bapo.rules.saved_rule import load_rule, save_rule

VENDOR = "bapo"
"""The vendor of our engine. For models and strategies without an engine of this vendor, verl uses its own engine."""


@dataclass
class BapoPolicyLossConfig(PolicyLossConfig):
    """verl's `PolicyLossConfig` with BAPO's settings; verl's `clip_ratio_low` and `clip_ratio_high` have no effect.

    Raises:
        ValueError: for a setting that is not allowed.
    """

    preset: str = DEFAULT_PRESET
    """A name for `ClipConfig.preset`. If the preset has a dual clip, verl's `clip_ratio_c` has no effect."""

    search: dict = field(default_factory=dict)
    """Fields of `ClipConfig`, in place of the preset's."""

    smoothing: dict | None = None
    """Fields of `SmoothingConfig`: the bounds follow earlier optimizer steps and need no forward pass."""

    scope: str | None = None
    """The tokens that a search uses: those of an "update" or of a "micro_batch"; None: the preset's scope."""

    rule: str | None = None
    """A rule's name in `RULES` (rules/other_rules.py) or of an installed rule, FILE.py:CLASS, or MODULE:CLASS, in place
    of BAPO's; the settings above are then not allowed."""

    rule_settings: dict = field(default_factory=dict)
    """Settings of that rule, in place of its defaults."""

    tapered: bool = False
    """Whether verl's rollout correction weighs tokens of positive advantage by 1, and the others by at most 1. It needs
    `algorithm.rollout_correction.rollout_is` outside bypass_mode, and a rule with a clip."""

    def __post_init__(self) -> None:
        if self.loss_mode != "bapo":
            raise ValueError(
                f"policy_loss.loss_mode {self.loss_mode!r} is not allowed with BAPO's config; set it to bapo"
            )
        for name in ("search", "rule_settings"):
            if not isinstance(given := getattr(self, name), Mapping):
                raise ValueError(f"policy_loss.{name} {given!r} is not allowed; it must be a mapping, such as {{}}")
        for name, kind, allowed in (("rule", str | None, "a name or None"), ("tapered", bool, "True or False")):
            if not isinstance(given := getattr(self, name), kind):
                raise ValueError(f"policy_loss.{name} {given!r} is not allowed; it must be {allowed}")
        self.update = _Update(self._bapos_rule() if self.rule is None else self._other_rule(self.rule))
        if self.tapered and self.update.rule.has_weights:
            raise ValueError(
                f"policy_loss.tapered {self.tapered} is not allowed with rule {self.rule}, which weighs tokens"
            )
        os.environ.setdefault("VERL_ENGINE_VENDOR", VENDOR)

    def _bapos_rule(self) -> ClipRule:
        if self.rule_settings:
            raise ValueError(f"policy_loss.rule_settings {dict(self.rule_settings)} is not allowed without rule")
        given = _known("search", self.search, ClipConfig)
        for name in ("smoothing", "scope"):
            if given.get(name) is not None:
                raise ValueError(f"policy_loss.search {name} {given[name]!r}: allowed as policy_loss.{name}")
        if self.smoothing is not None:
            smoothing = _known("smoothing", self.smoothing, SmoothingConfig)
            given["smoothing"] = SmoothingConfig(**{"half_life": None} | smoothing)
        if self.scope is not None:
            given["scope"] = self.scope
        config = replace(ClipConfig.preset(self.preset), **given)
        print(f"openrlhf-bapo: verl's policy loss is bapo, scope {config.scope}, {config}", flush=True)
        return make_clip_rule(config)

    def _other_rule(self, given: str) -> ClipRule:
        name = given if given in RULES else located(given)
        if name not in RULES and not is_own_rule(name):
            allowed = *RULES, *installed_rules(), "FILE.py:CLASS", "MODULE:CLASS"
            raise ValueError(f"policy_loss.rule {given!r} is unknown; allowed: {', '.join(allowed)}")
        if self.preset != DEFAULT_PRESET or self.search or self.smoothing or self.scope:
            raise ValueError(f"policy_loss.rule {given!r} is allowed only without preset, search, smoothing and scope")
        settings = default_settings(name)
        for setting, value in self.rule_settings.items():
            if setting not in settings:
                known = ", ".join(settings)
                raise ValueError(
                    f"policy_loss.rule_settings {setting!r} is unknown with rule {given}; allowed: {known}"
                )
            kind = type(settings[setting])
            if type(value) not in ((int, float) if kind is float else (kind,)):
                raise ValueError(f"policy_loss.rule_settings {setting} {value!r}: allowed: {kind.__name__}")
        settings |= self.rule_settings
        print(f"openrlhf-bapo: verl's policy loss is bapo, rule {given}, {settings}", flush=True)
        return make_rule(name, settings)


def _known(name: str, given: Any, config: type) -> dict:
    """Return a setting of the policy loss whose keys are fields of a config; ValueError for another key."""
    allowed = [field.name for field in fields(config)]
    if not isinstance(given, Mapping):
        raise ValueError(f"policy_loss.{name} {given!r} is not allowed; it must be a mapping with {', '.join(allowed)}")
    for key in given:
        if key not in allowed:
            raise ValueError(f"policy_loss.{name} {key!r} is unknown; allowed: {', '.join(allowed)}")
    return dict(given)


class _Update(RuleUpdates):
    """The running optimizer step: what the engine and the loss share. `group` is None while no step is running."""

    is_searching = False


def _weight(response_mask: torch.Tensor, loss_agg_mode: str, config: ActorConfig) -> torch.Tensor:
    """Return each token's weight in verl's aggregation, up to a factor that all micro-batches share."""
    settings = config.policy_loss.update.rule.config
    if loss_agg_mode == "seq-mean-token-sum-norm" and config.loss_scale_factor is None:
        padded_length = torch.tensor(response_mask.shape[-1])  # verl pads each micro-batch to its longest response
        return share_weights(response_mask, settings, "micro_batch", padded_length)
    mean_over = "sequence" if loss_agg_mode == "seq-mean-token-mean" else "update"
    return share_weights(response_mask, settings, mean_over)


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
    """Return verl's `compute_policy_loss_vanilla` between the bounds, or with the weights, of a clip rule.

    It has the same arguments and results.

    Aggregation is verl's own, and so is rollout correction outside bypass_mode. In that mode, `rollout_is` and
    `rollout_rs` have no effect, because verl applies them in its own bypass loss. Raises RuntimeError without BAPO's
    engine.
    """
    assert config is not None  # as verl's own losses do
    update: _Update = config.policy_loss.update
    if update.group is None:
        vendor = os.environ.get("VERL_ENGINE_VENDOR")
        raise RuntimeError(
            f"policy loss bapo: strategy {config.strategy}, VERL_ENGINE_VENDOR {vendor}; "
            f"allowed: strategy fsdp or fsdp2, VERL_ENGINE_VENDOR {VENDOR}"
        )
    rule, settings = update.rule, update.rule.config
    weight = _weight(response_mask, loss_agg_mode, config)
    if config.policy_loss.tapered:
        if rollout_is_weights is None:
            raise RuntimeError(
                "policy_loss.tapered True: there is no rollout correction; allowed with "
                "algorithm.rollout_correction.rollout_is token or sequence, and bypass_mode False"
            )
        rollout_is_weights = torch.where(advantages > 0, 1.0, rollout_is_weights.clamp(max=1.0))
        weight = weight * rollout_is_weights
    tokens = Tokens(log_prob.detach(), old_log_prob, advantages, weight)
    is_micro_batch = settings.scope == "micro_batch"
    if update.is_searching or is_micro_batch or not rule.needs_tally_first:
        rule.tally(tokens)
    if update.is_searching:
        return log_prob.new_zeros(()), {}
    if is_micro_batch:
        update.close_update()
    if settings.dual_clip is not None:
        vars(config).update(clip_ratio_c=settings.dual_clip)
    update.entropy_rule.tally(rule, tokens, config.clip_ratio_c)
    update.tally_offpolicy(tokens)  # the loss does not know the age of its tokens
    weights = rule.weights(tokens)
    if weights is not None:
        # At ratio 1, the surrogate's gradient with advantages w A is that of w A log pi.
        vars(config).update(clip_ratio_low=1.0, clip_ratio_high=math.inf)
        old, weighed = log_prob.detach(), weights * advantages
        loss, metrics = compute_policy_loss_vanilla(
            old, log_prob, weighed, response_mask, loss_agg_mode, config, rollout_is_weights
        )
        kl = (old_log_prob - old).clamp(-20.0, 20.0)
        return loss, metrics | {"actor/ppo_kl": masked_mean(kl, response_mask).item()}
    lower, upper = rule.bounds(tokens)
    # verl's config is frozen: it refuses to set an attribute.
    vars(config).update(clip_ratio_low=1 - lower, clip_ratio_high=upper - 1)
    return compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights
    )


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device=["cuda", "npu", "cpu"], vendor=VENDOR)
class BapoFSDPEngine(FSDPEngineWithLMHead):
    """verl's engine, with an update of the clip rule around each optimizer step; logs the metrics of each.

    Its checkpoints have the state of a rule that follows earlier steps, from each rank.
    """

    _rule: ClipRule | None = None  # known from the first optimizer step on
    _resumed: Path | None = None  # the saved state that the next optimizer step loads
    _is_skipped = False  # whether verl has skipped the last optimizer step

    def train_batch(self, data: TensorDict, loss_function: partial) -> dict:
        """Make verl's optimizer step, and close the rule's update before or after it, as the rule needs."""
        update: _Update = loss_function.keywords["config"].policy_loss.update
        rule = self._rule = update.rule
        if self._resumed is not None:
            load_rule(rule, self._resumed)
            self._resumed = None
        update.group = self.get_data_parallel_group()
        if rule.needs_tally_first and rule.config.scope == "update":
            update.is_searching = True
            self.infer_batch(data, loss_function)
            update.is_searching = False
            update.close_update()
        outputs = super().train_batch(data, loss_function)
        if not rule.needs_tally_first:
            update.close_update(self._is_skipped)
        update.entropy_rule.close_update(self._is_skipped)
        for name, value in update.take_metrics().items():
            # An update without active tokens has no share; with it, verl's mean over a rollout's updates would be NaN.
            if not (name.startswith("bapo/") and math.isnan(value)):
                outputs["metrics"][name] = [value]
        update.group = None
        return outputs

    def optimizer_step(self) -> float:
        """Make verl's optimizer step, which it skips if a gradient is not finite."""
        norm = super().optimizer_step()
        self._is_skipped = not math.isfinite(norm)
        return norm

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Write verl's checkpoint, and the rule's state beside it."""
        super().save_checkpoint(local_path, *args, **kwargs)
        if self._rule is not None:
            save_rule(self._rule, _saved_rule(local_path))

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Load verl's checkpoint; the next optimizer step loads the rule's state."""
        super().load_checkpoint(local_path, *args, **kwargs)
        self._resumed = _saved_rule(local_path)


def _saved_rule(local_path: str) -> Path:
    return Path(local_path, f"clip_rule_rank_{dist.get_rank()}")
