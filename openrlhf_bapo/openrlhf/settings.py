"""Our settings in OpenRLHF's parsed arguments, as the seams read them."""

from argparse import Namespace
from dataclasses import fields

from openrlhf_bapo.core.clip_bounds import ClipConfig
from openrlhf_bapo.core.partial_rollouts import PartialConfig
from openrlhf_bapo.core.replay_pool import ReplayConfig
from openrlhf_bapo.core.steady_bounds import SmoothingConfig

SCOPES = ("update", "micro_batch")
TOKEN_WEIGHTS = ("none", "rollout_prob")


def is_off_policy(args: Namespace) -> bool:
    """Whether samples must know their versions and the engine's log-probs; `args` as OpenRLHF nests them."""
    return args.offpolicy.ratio_base is not None


def replay_config_from_args(replay: Namespace) -> ReplayConfig:
    """The pool's settings from `args.replay`."""
    return ReplayConfig(**{field.name: getattr(replay, field.name) for field in fields(ReplayConfig)})


def partial_config_from_args(partial: Namespace) -> PartialConfig:
    """The budget's settings from `args.partial`."""
    return PartialConfig(**{field.name: getattr(partial, field.name) for field in fields(PartialConfig)})


def clip_config_from_args(bapo: Namespace) -> ClipConfig:
    """The search's settings from `args.bapo`, as `resolve_flags` left them."""
    return ClipConfig(**{field.name: getattr(bapo, field.name) for field in fields(ClipConfig)})


def smoothing_config_from_args(bapo: Namespace) -> SmoothingConfig | None:
    """How slowly the bounds follow, from `args.bapo`; None: found anew in every update."""
    return smoothing_config(bapo.smoothing, vars(bapo)) if bapo.smoothing else None


def smoothing_config(half_life: float, given: dict) -> SmoothingConfig:
    start = given.get("smoothing_start")
    return SmoothingConfig(half_life, given["smoothing_of"], None if start is None else tuple(start))
