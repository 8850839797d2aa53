"""Our settings in OpenRLHF's parsed arguments, as the seams read them."""

from argparse import Namespace
from dataclasses import fields

from openrlhf_bapo.core.clip_config import SEARCH_FIELDS, ClipConfig, SmoothingConfig
from openrlhf_bapo.core.clip_rules import ClipRule, make_clip_rule
from openrlhf_bapo.core.other_rules import RULES
from openrlhf_bapo.core.partial_rollouts import PartialConfig
from openrlhf_bapo.core.replay_pool import ReplayConfig

TOKEN_WEIGHTS = ("none", "rollout_prob")


def is_off_policy(args: Namespace) -> bool:
    """Say whether samples must know their versions and the engine's log-probs; `args` as OpenRLHF nests them."""
    return args.offpolicy.ratio_base is not None


def is_decoupled(args: Namespace) -> bool:
    """Say whether IS correction weighs a ratio against the policy that a training step starts from."""
    return args.offpolicy.objective == "decoupled"


def has_proximal_ratio(args: Namespace) -> bool:
    """Say whether the loss's ratio is against the policy that a training step starts from, even for older tokens."""
    can_be_stale = bool(args.train.async_enable or args.partial.token_budget)
    return is_decoupled(args) or (args.offpolicy.ratio_base == "recomputed" and can_be_stale)


def replay_config_from_args(replay: Namespace) -> ReplayConfig:
    """Return the replay pool's settings from `args.replay`."""
    return ReplayConfig(**{field.name: getattr(replay, field.name) for field in fields(ReplayConfig)})


def partial_config_from_args(partial: Namespace) -> PartialConfig:
    """Return the token budget's settings from `args.partial`."""
    return PartialConfig(**{field.name: getattr(partial, field.name) for field in fields(PartialConfig)})


def clip_rule_from_args(args: Namespace) -> ClipRule | None:
    """Return the clip rule of `--policy_loss`; None with OpenRLHF's losses, ppo and gspo."""
    if args.policy_loss == "bapo":
        return make_clip_rule(clip_config_from_args(args.bapo))
    if args.policy_loss in RULES:
        return RULES[args.policy_loss](**vars(getattr(args, args.policy_loss)))
    return None


def clip_config_from_args(bapo: Namespace) -> ClipConfig:
    """Return BAPO's settings from `args.bapo`, as `resolve_flags` left them; the dual clip is in `args.actor`."""
    smoothing = smoothing_config(bapo.smoothing, vars(bapo)) if bapo.smoothing else None
    search = {name: getattr(bapo, name) for name in SEARCH_FIELDS}
    return ClipConfig(**search, scope=bapo.scope, smoothing=smoothing)


def smoothing_config(half_life: float, given: dict) -> SmoothingConfig:
    """Return the settings of `--bapo.smoothing`; `given` has those of `--bapo.smoothing_*`."""
    start = given.get("smoothing_start")
    return SmoothingConfig(half_life, given["smoothing_of"], None if start is None else tuple(start))
