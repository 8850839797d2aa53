"""The clip rule that `--policy_loss`, `--bapo.*` and the flags of the other rules ask for."""

from argparse import Namespace

from openrlhf_bapo.rules.clip_config import SEARCH_FIELDS, ClipConfig, SmoothingConfig
from openrlhf_bapo.rules.clip_rules import ClipRule, make_clip_rule
from openrlhf_bapo.rules.other_rules import RULES, make_rule
from openrlhf_bapo.rules.own_rules import is_own_rule


def clip_rule_from_args(args: Namespace) -> ClipRule | None:
    """Return the clip rule of `--policy_loss`; None with ppo and gspo, and where it is None (Molt's own loss)."""
    if args.policy_loss == "bapo":
        return make_clip_rule(clip_config_from_args(args.bapo))
    if args.policy_loss in RULES:
        return make_rule(args.policy_loss, vars(getattr(args, args.policy_loss)))
    if args.policy_loss is not None and is_own_rule(args.policy_loss):
        return make_rule(args.policy_loss, vars(args.rule) if hasattr(args, "rule") else {})
    return None


def clip_config_from_args(bapo: Namespace) -> ClipConfig:
    """Return BAPO's settings from `args.bapo`, as `resolve_loss_flags` left them; the dual clip is in `args.actor`."""
    smoothing = smoothing_config(bapo.smoothing, vars(bapo)) if bapo.smoothing else None
    search = {name: getattr(bapo, name) for name in SEARCH_FIELDS}
    return ClipConfig(**search, scope=bapo.scope, smoothing=smoothing)


def smoothing_config(half_life: float, given: dict) -> SmoothingConfig:
    """Return the settings of `--bapo.smoothing`; `given` has those of `--bapo.smoothing_*`."""
    start = given.get("smoothing_start")
    return SmoothingConfig(half_life, given["smoothing_of"], None if start is None else tuple(start))
