"""Reads our settings from OpenRLHF's parsed arguments."""

from argparse import Namespace
from dataclasses import fields
from typing import Any

from openrlhf_bapo.offpolicy.partial_rollouts import PartialConfig
from openrlhf_bapo.offpolicy.replay_pool import ReplayConfig

TOKEN_WEIGHTS = ("none", "rollout_prob")

ESTIMATORS_OVER_SAMPLES = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")
"""Advantage estimators that compare the responses to a prompt."""

_RECURRENT = {"linear_attention", "hybrid", "hybrid_sliding", "conv", "mamba", "recurrent"}
"""Kinds of layers in configurations of transformers that carry a state from token to token."""


def is_off_policy(args: Namespace) -> bool:
    """Say whether samples need policy versions and the engine's log-probs; `args` as OpenRLHF nests them."""
    return args.offpolicy.ratio_base is not None


def is_decoupled(args: Namespace) -> bool:
    """Say whether the ratio is against the policy that a training step starts from, beside `--offpolicy.weight`."""
    return args.offpolicy.objective == "decoupled"


def is_tapered(args: Namespace) -> bool:
    """Say whether a stale token's loss has a tapered weight."""
    return args.offpolicy.weight == "tapered"


def has_clip_rule(args: Namespace) -> bool:
    """Say whether the loss is one of ours, with a clip rule whose updates are whole optimizer steps."""
    return args.policy_loss not in ("ppo", "gspo")


def has_proximal_ratio(args: Namespace) -> bool:
    """Say whether the loss's ratio is against the policy that a training step starts from, even for older tokens."""
    can_be_stale = bool(args.train.async_enable or args.partial.token_budget)
    return is_decoupled(args) or (args.offpolicy.ratio_base == "recomputed" and can_be_stale)


def reads_engine_log_probs(args: Namespace) -> bool:
    """Say whether the loss or the metrics read the engine's log-probs beside the ratio's denominator."""
    return has_proximal_ratio(args) or args.algo.advantage.is_correction_level != "off"


def compares_engine(args: Namespace) -> str:
    """Return the flag and value by which loss or search use the engine's log-probs as the actor's; "" if none does."""
    off, level = args.offpolicy, args.algo.advantage.is_correction_level
    if off.ratio_base in ("rollout", "auto"):
        return f"--offpolicy.ratio_base {off.ratio_base}"
    if is_tapered(args):
        return "--offpolicy.weight tapered"
    if args.bapo.token_weight == "rollout_prob" and has_proximal_ratio(args):
        return "--bapo.token_weight rollout_prob"
    return "" if level == "off" else f"--algo.advantage.is_correction_level {level}"


def replay_config_from_args(replay: Namespace) -> ReplayConfig:
    """Return the replay pool's settings from `args.replay`."""
    return ReplayConfig(**{field.name: getattr(replay, field.name) for field in fields(ReplayConfig)})


def partial_config_from_args(partial: Namespace) -> PartialConfig:
    """Return the token budget's settings from `args.partial`."""
    return PartialConfig(**{field.name: getattr(partial, field.name) for field in fields(PartialConfig)})


def trained_models(args: Namespace) -> tuple[str, ...]:
    """Return the names of the models that are trained: the actor, and with GAE the critic."""
    return ("actor", "critic") if args.algo.advantage.estimator == "gae" else ("actor",)


def num_ranks_of(args: Namespace) -> dict[str, int]:
    """Count the data-parallel ranks of each model that is trained."""
    models = {name: getattr(args, name) for name in trained_models(args)}
    gpus_per_rank = args.ds.ring_attn_size * args.ds.tensor_parallel_size
    return {name: model.num_nodes * model.num_gpus_per_node // gpus_per_rank for name, model in models.items()}


def packing_problem(args: Namespace, config: Any) -> str | None:
    """Return the flag that packs samples into one row, and why a model of this configuration would mix them.

    OpenRLHF marks the samples of a row by their positions alone, which attention layers of transformers 5.15 read.
    """
    flags = {
        "ds.packing_samples": args.ds.packing_samples,
        "train.dynamic_batch_enable": args.train.dynamic_batch_enable,
        f"ds.ring_attn_size {args.ds.ring_attn_size}": args.ds.ring_attn_size > 1,
    }
    flag = next((flag for flag, packs in flags.items() if packs), None)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    # The text models of Qwen2-VL and Qwen2.5-VL take positions in one row for those of images.
    if flag is None or not (_RECURRENT & {*kinds} or text.model_type in ("qwen2_vl_text", "qwen2_5_vl_text")):
        return None
    return f"--{flag}: the layers of a {text.model_type} would mix packed samples; allowed: without packing"
