"""Our flags beside OpenRLHF's: their definitions, their checks before anything starts, and their resolved values."""

import argparse
import math
from argparse import Namespace
from collections.abc import Sequence, Set
from dataclasses import fields

from openrlhf_bapo.command.loss_flags import add_loss_flags, resolve_loss_flags
from openrlhf_bapo.command.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.core.other_rules import rule_class
from openrlhf_bapo.core.partial_rollouts import ON_STALE, PartialConfig
from openrlhf_bapo.core.replay_pool import STRATEGIES, ReplayConfig
from openrlhf_bapo.core.staleness_weights import LEVELS, WEIGHTS
from openrlhf_bapo.openrlhf.settings import TOKEN_WEIGHTS

RATIO_BASES = ("auto", "recomputed", "rollout")
OBJECTIVES = ("behavior", "decoupled")

_CORRECTION_CAP = 2.0
"""Highest weight of a token with `--offpolicy.weight capped`."""

_CORRECTION = "algo.advantage.is_correction_"

_UNCUT = 2**31 - 1
"""A token budget that no response can use up."""

_OFF_POLICY_GROUPS = ((ReplayConfig, "replay"), (PartialConfig, "partial"))

_REPLAY_HELP = {
    "ratio": "replayed groups per fresh group; 0: off",
    "capacity": "highest number of groups in the pool",
    "max_staleness": "highest staleness of a replayed group, in policy versions",
    "max_reuse": "how many times a group may be replayed",
    "seed": "seed of the draws from the pool",
}

_REWARD_FAULT_HELP = {
    "patience": (600.0, "seconds during which a reward call is repeated while its servers do not answer; 0: no repeat"),
    "timeout": (300.0, "seconds to wait for one answer of a reward server or function"),
    "max_drop_rate": (0.1, "share of a batch's prompt groups that may be dropped because they have no reward; 0: none"),
}

_PARTIAL_HELP = {
    "token_budget": "tokens by which a response may grow in one rollout; it continues in a later one; 0: off",
    "oversample": "prompt groups in flight per group that a rollout needs",
    "max_segments": "highest number of rollouts that may write one response; 0: any number",
    "max_staleness": "highest staleness of a finished group's oldest token, in policy versions",
}


def add_flags(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add our flags. The default None means "not given": `resolve_flags` then takes the preset's value.

    Args:
        parser: OpenRLHF's.
        argv: the command's flags, for those of a rule of the user's own.
    """
    for action in parser._actions:
        if action.dest == "ds.param_dtype":
            action.choices = [*(action.choices or ()), "fp32"]
            action.help = "type of all models, engines too (default: bf16; on a CPU fp32, which is for CPUs only)"
    _add_bapo_flags(add_loss_flags(parser, argv, ("ppo", "gspo"), "--actor.policy_loss_type"))
    _add_off_policy_flags(parser.add_argument_group("off-policy data"))
    _add_partial_flags(parser.add_argument_group("partial rollouts with a token budget"))
    _add_reward_fault_flags(parser.add_argument_group("rewards that fail"))
    parser.add_argument(
        "--ckpt.on_interrupt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on SIGTERM or Ctrl-C, finish the training step and write a checkpoint; a second signal ends the run at "
        "once",
    )
    parser.add_argument(
        "--eval.at_start",
        action="store_true",
        help="also evaluate before the first update, logged as step 0 (sync training only)",
    )


def _add_bapo_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--bapo.token_weight",
        choices=TOKEN_WEIGHTS,
        default=None,
        help="weight of a token in the search: none, or its probability under the rollout policy (as section 4.2 of "
        "the paper prints Eq. 8)",
    )
    group.add_argument(
        "--bapo.discard_saved",
        action="store_true",
        default=None,
        help="with --ckpt.load_enable: start the average of --bapo.smoothing, --m2.half_life or --balanced.half_life "
        "again instead of loading it",
    )
    group.add_argument(
        "--bapo.dump_tokens",
        type=int,
        default=None,
        help="write a sample of the tokens trained on every N global steps, for `openrlhf-bapo tokens` (default: off)",
    )
    group.add_argument(
        "--bapo.max_skipped_updates",
        type=int,
        default=3,
        help="how many optimizer steps in a row may be skipped because their loss or gradient is not finite; for every "
        "policy loss (default: 3)",
    )


def _add_off_policy_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--offpolicy.ratio_base",
        choices=RATIO_BASES,
        default=None,
        help="denominator of the importance ratio for fresh samples: log-probs recomputed by the actor (as OpenRLHF "
        "does), or the rollout engine's; auto: the engine's in async training and for tokens of an older version, else "
        "recomputed (default with bapo, and wherever data can be stale: auto)",
    )
    group.add_argument(
        "--offpolicy.objective",
        choices=OBJECTIVES,
        default="behavior",
        help="behavior: the ratio is against the policy that generated the token; decoupled: it is against the policy "
        "that the training step starts from, and --offpolicy.weight corrects for the rest (default: behavior)",
    )
    group.add_argument(
        "--offpolicy.weight",
        choices=WEIGHTS,
        default=None,
        help="with --offpolicy.objective decoupled, the weight of a token's loss by s, the probability under the "
        "policy that the training step starts from over that under the policy that generated it; capped: min(s, 2), "
        "or --algo.advantage.is_correction_threshold; masked: s, or 0 outside [0.5, 5]; tapered: 1 where the "
        "advantage is positive, min(s, 1) elsewhere; fresh tokens have s = 1 with tapered (default: capped)",
    )
    group.add_argument(
        "--offpolicy.weight_level",
        choices=LEVELS,
        default=None,
        help="with --offpolicy.weight masked or tapered: s of the token, or of the whole response; masked takes the "
        "geometric mean of the response's (default: token with masked, sequence with tapered)",
    )
    group.add_argument(
        "--offpolicy.lag",
        type=int,
        default=0,
        help="train on each rollout N rollouts after it was generated, for studies of exact staleness (sync training "
        "only; default: 0)",
    )
    defaults = ReplayConfig()
    for name, text in _REPLAY_HELP.items():
        default = getattr(defaults, name)
        group.add_argument(f"--replay.{name}", type=type(default), default=default, help=f"{text} (default: {default})")
    group.add_argument(
        "--replay.strategy",
        choices=STRATEGIES,
        default=defaults.strategy,
        help="how groups are drawn; advantage: with probabilities proportional to their mean absolute advantage "
        f"(default: {defaults.strategy})",
    )
    group.add_argument(
        "--replay.skip_uninformative",
        action=argparse.BooleanOptionalAction,
        default=defaults.skip_uninformative,
        help="leave groups with equal rewards out of the pool",
    )
    group.add_argument(
        "--replay.discard_saved", action="store_true", help="with --ckpt.load_enable: start with an empty pool"
    )


def _add_partial_flags(group: argparse._ArgumentGroup) -> None:
    defaults = PartialConfig()
    for name, text in _PARTIAL_HELP.items():
        default = getattr(defaults, name)
        group.add_argument(
            f"--partial.{name}", type=type(default), default=default, help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--partial.on_stale",
        choices=ON_STALE,
        default=defaults.on_stale,
        help="for a response that would become too old, or exceed --partial.max_segments: drop its group, or finish "
        "the response early, as truncated "
        f"(default: {defaults.on_stale})",
    )
    group.add_argument(
        "--partial.discard_saved",
        action="store_true",
        help="with --ckpt.load_enable: start without the saved unfinished responses and samples that wait",
    )


def _add_reward_fault_flags(group: argparse._ArgumentGroup) -> None:
    for name, (default, text) in _REWARD_FAULT_HELP.items():
        group.add_argument(f"--reward_fault.{name}", type=float, default=default, help=f"{text} (default: {default:g})")


def check_flags(argv: list[str]) -> Namespace:
    """Refuse mistakes in our flags alone, before OpenRLHF's slow imports; a mistake exits with code 2.

    Returns:
        Our flags, and those of OpenRLHF's that name a Python file, for `checks.load_early`; flat, names with dots.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = exit_with_one_line
    add_flags(parser, argv)
    parser.add_argument("--train.agent_func_path")
    parser.add_argument("--reward.remote_url")
    args = parser.parse_known_args(argv)[0]
    try:
        resolve_flags(args)
    except FlagError as error:
        parser.error(str(error))
    return args


def resolve_flags(args: Namespace, given_names: Set[str] = frozenset()) -> None:
    """Check our flags and fill in those that were not given, in place.

    Args:
        args: flat, names with dots as argparse leaves them. OpenRLHF's may be missing (see `check_flags`).
        given_names: the flags of OpenRLHF's on the command line.

    Raises:
        FlagError: at the first mistake.
    """
    values = vars(args)
    policy_loss = args.policy_loss or values.get("actor.policy_loss_type", "ppo")
    policy_loss = resolve_loss_flags(values, policy_loss)
    _check_run(values)
    _check_reward_faults(values)
    _check_lag(values)
    _fill_in_lag(values)
    _fill_in_objective(values, policy_loss, given_names)
    _check_off_policy(values, policy_loss)
    values["offpolicy.ratio_base"] = _ratio_base(values, policy_loss)
    _check_dump_tokens(values, policy_loss)
    args.policy_loss = policy_loss
    if values.get("ds.lora.target_modules") == ["all-linear"]:
        values["ds.lora.target_modules"] = "all-linear"  # PEFT looks for modules of this name if it is in a list
    values["actor.policy_loss_type"] = "gspo" if policy_loss == "gspo" else "ppo"
    is_logged = policy_loss not in ("ppo", "gspo") or values["bapo.dump_tokens"]
    if is_logged and values.get("actor.entropy_coef") is None:
        values["actor.entropy_coef"] = 0.0  # logs the entropy, which a clip rule should keep; no bonus


def _check_run(values: dict) -> None:
    if (most := values["bapo.max_skipped_updates"]) < 0:
        raise FlagError(f"--bapo.max_skipped_updates {most}: allowed: 0 or more")
    if values["eval.at_start"] and values.get("train.async_enable"):
        raise FlagError("--eval.at_start: allowed only without --train.async_enable")


def _check_reward_faults(values: dict) -> None:
    for name, allowed, holds in (
        ("patience", "0 or more seconds", lambda value: 0 <= value < math.inf),
        ("timeout", "seconds above 0", lambda value: 0 < value < math.inf),
        ("max_drop_rate", "from 0, below 1", lambda value: 0 <= value < 1),
    ):
        if not holds(value := values[f"reward_fault.{name}"]):
            raise FlagError(f"--reward_fault.{name} {value:g}: allowed: {allowed}")


def _check_dump_tokens(values: dict, policy_loss: str) -> None:
    every = values["bapo.dump_tokens"] or 0
    if every < 0:
        raise FlagError(f"--bapo.dump_tokens {every}: allowed: a number of global steps, or 0 (off)")
    if every and (policy_loss == "gspo" or values["offpolicy.ratio_base"] is None):
        raise FlagError(
            f"--bapo.dump_tokens {every}: needs the ratio and the staleness of each token; allowed with --policy_loss "
            f"bapo, m2 or divergence, or with ppo and --offpolicy.ratio_base; this run has {policy_loss}"
        )


def _check_lag(values: dict) -> None:
    if not (lag := values["offpolicy.lag"]):
        return
    if lag < 0:
        raise FlagError(f"--offpolicy.lag {lag}: allowed: a number of rollouts, 0 or more")
    if values.get("train.async_enable"):
        raise FlagError(f"--offpolicy.lag {lag}: allowed only without --train.async_enable, which has its own queue")
    defaults = PartialConfig()
    for name in ("token_budget", "oversample", "max_segments", "max_staleness", "on_stale"):
        if (value := values[f"partial.{name}"]) != getattr(defaults, name):
            raise FlagError(f"--partial.{name} {value}: allowed without --offpolicy.lag, which is {lag}")


def _fill_in_lag(values: dict) -> None:
    """Turn a lag into a token budget that is never used up. Its rollouts then wait like unfinished responses."""
    if lag := values["offpolicy.lag"]:
        values |= {"partial.token_budget": _UNCUT, "partial.oversample": 1.0, "partial.max_staleness": lag}


def _fill_in_objective(values: dict, policy_loss: str, given_names: Set[str]) -> None:
    """Fill in the parts of the objective that are not given: the ratio's denominator, and the weight."""
    objective, weight, level = (values[f"offpolicy.{name}"] for name in ("objective", "weight", "weight_level"))
    flag = f"--offpolicy.objective {objective}"
    if objective == "behavior":
        for name, value in (("weight", weight), ("weight_level", level)):
            if value not in (None, "none"):
                raise FlagError(
                    f"--offpolicy.{name} {value}: would count staleness twice with {flag}, whose ratio has it; allowed "
                    "with --offpolicy.objective decoupled"
                )
        values["offpolicy.weight"] = "none"
        return
    if policy_loss == "gspo" or (policy_loss not in ("ppo", "bapo") and rule_class(policy_loss).has_weights):
        raise FlagError(
            f"{flag}: clips each token's ratio; allowed with --policy_loss ppo, bapo, m2 or divergence, not "
            f"{policy_loss}"
        )
    if values["offpolicy.ratio_base"] == "rollout":
        raise FlagError(f"--offpolicy.ratio_base rollout: allowed with {flag}: auto, recomputed")
    values["offpolicy.ratio_base"] = "recomputed"
    if level and weight not in ("masked", "tapered"):
        raise FlagError(
            f"--offpolicy.weight_level {level}: allowed with --offpolicy.weight masked or tapered, not {weight}"
        )
    if weight in ("none", "tapered"):
        _fill_in_no_correction(values, weight)
    else:
        _fill_in_correction(values, weight, level, given_names)


def _fill_in_no_correction(values: dict, weight: str) -> None:
    if (level := values.get(f"{_CORRECTION}level", "off")) != "off":
        raise FlagError(
            f"--{_CORRECTION}level {level}: weighs tokens too; allowed with --offpolicy.weight {weight}: off"
        )
    if weight == "tapered":
        values["offpolicy.weight_level"] = values["offpolicy.weight_level"] or "sequence"


def _fill_in_correction(values: dict, weight: str | None, level: str | None, given_names: Set[str]) -> None:
    """Set OpenRLHF's IS correction, which has the weights "capped" and "masked". Its own flags choose without one."""
    given = {name: values[_CORRECTION + name] for name in ("level", "mode") if _CORRECTION + name in given_names}
    if given.get("level") == "off":
        raise FlagError(f"--{_CORRECTION}level off: is --offpolicy.weight none or tapered; allowed: token, seq")
    if weight:
        wanted = {"level": "seq" if level == "sequence" else "token", "mode": "clip" if weight == "capped" else "mask"}
        for name, value in given.items():
            if value != wanted[name]:
                setting = f"--offpolicy.weight {weight}" + (f" --offpolicy.weight_level {level}" if level else "")
                raise FlagError(f"--{_CORRECTION}{name} {value}: allowed with {setting}: {wanted[name]}")
        values |= {_CORRECTION + name: value for name, value in wanted.items()}
    elif "level" not in given:
        values[f"{_CORRECTION}level"] = "token"
    is_token_ratio = values[f"{_CORRECTION}level"] == "token" and values.get(f"{_CORRECTION}gating", "ratio") == "ratio"
    if is_token_ratio and not weight and "mode" not in given:
        values[f"{_CORRECTION}mode"] = "clip"
    is_capped = values.get(f"{_CORRECTION}mode") == "clip"
    if is_capped and f"{_CORRECTION}threshold" not in given_names:
        values[f"{_CORRECTION}threshold"] = [0.0, _CORRECTION_CAP]
    values["offpolicy.weight"] = "capped" if is_capped else "masked"


def _ratio_base(values: dict, policy_loss: str) -> str | None:
    """Return the ratio's denominator for fresh samples.

    "recomputed" and "rollout" are for all tokens. "auto" is recomputed, except for tokens of an older version. None
    leaves the choice to OpenRLHF.
    """
    base, is_async = values["offpolicy.ratio_base"], values.get("train.async_enable")
    has_rule = policy_loss not in ("ppo", "gspo")
    token_budget, is_async_ppo = values["partial.token_budget"], is_async and policy_loss == "ppo"
    if base is None and is_async_ppo and _is_correction_level(values) != "off":
        return "recomputed"  # as in OpenRLHF's own command, whose correction belongs to this ratio
    if base is None and not (has_rule or values["replay.ratio"] or token_budget or is_async_ppo):
        return None
    if base in (None, "auto"):
        return "rollout" if is_async else "auto" if token_budget else "recomputed"
    return base


def source_of_staleness(values: dict) -> str | None:
    """Return the flag that makes fresh samples stale, with its value; None if none does."""
    if lag := values["offpolicy.lag"]:
        return f"--offpolicy.lag {lag}"
    if token_budget := values["partial.token_budget"]:
        return f"--partial.token_budget {token_budget}"
    return "--train.async_enable" if values.get("train.async_enable") else None


def _is_correction_level(values: dict) -> str:
    return values.get("algo.advantage.is_correction_level", "off")


def _check_off_policy(values: dict, policy_loss: str) -> None:
    """Check `--offpolicy.ratio_base`, `--replay.*` and `--partial.*`."""
    for kind, group in _OFF_POLICY_GROUPS:
        _check_settings(kind, values, group)
    level, base = _is_correction_level(values), _ratio_base(values, policy_loss)
    source = source_of_staleness(values)
    is_decoupled = values["offpolicy.objective"] == "decoupled"
    if base == "recomputed" and source and policy_loss != "ppo" and not is_decoupled:
        raise FlagError(
            f"--offpolicy.ratio_base recomputed: hides the staleness of {source}; allowed: auto, rollout; also "
            "recomputed with --policy_loss ppo, or with --offpolicy.objective decoupled"
        )
    if base in ("rollout", "auto") and level != "off":
        raise FlagError(
            f"--algo.advantage.is_correction_level {level}: counts the mismatch of trainer and engine a second time; "
            f"allowed with {source or '--offpolicy.ratio_base rollout'}: off; also token, seq with "
            "--offpolicy.objective decoupled, or with --policy_loss ppo and --offpolicy.ratio_base recomputed"
        )
    if base == "rollout" and policy_loss == "gspo":
        raise FlagError("--offpolicy.ratio_base rollout: allowed with every --policy_loss but gspo")
    if values["partial.token_budget"]:
        _check_token_budget(values, policy_loss)
    if values["replay.ratio"]:
        _check_replay(values, values["replay.ratio"], policy_loss)


def _check_settings(kind: type, values: dict, group: str) -> None:
    """Check the flags of a group by constructing its settings, whose fields are these flags."""
    try:
        kind(**{field.name: values[f"{group}.{field.name}"] for field in fields(kind)})
    except ValueError as error:
        raise FlagError(f"--{group}.{error}") from None


def _check_replay(values: dict, ratio: float, policy_loss: str) -> None:
    """Refuse flags that replay cannot be combined with, and sizes that leave samples over."""
    if policy_loss == "gspo":
        raise FlagError(f"--replay.ratio {ratio}: allowed with every --policy_loss but gspo")
    num_samples = values.get("rollout.n_samples_per_prompt")
    if num_samples is None:
        return  # OpenRLHF's flags are not known yet
    if num_samples == 1 and values["replay.skip_uninformative"]:
        raise FlagError(
            "--replay.skip_uninformative: skips every group of --rollout.n_samples_per_prompt 1; allowed: "
            "--no-replay.skip_uninformative"
        )
    num_groups, size = values["rollout.batch_size"], values["train.batch_size"]
    if num_groups * num_samples % size:
        raise FlagError(
            f"--train.batch_size {size}: with --replay.ratio it must divide --rollout.batch_size x "
            f"--rollout.n_samples_per_prompt, which is {num_groups * num_samples}"
        )
    num_drawn, least = round(ratio * num_groups), size // math.gcd(size, num_samples)
    if num_drawn < least:
        raise FlagError(
            f"--replay.ratio {ratio}: draws {num_drawn} groups per training step; allowed: a ratio that draws at least "
            f"{least}, to fill whole optimizer steps of --train.batch_size {size}"
        )
    if values["data.max_images_per_prompt"]:
        raise FlagError(f"--replay.ratio {ratio}: allowed without --data.max_images_per_prompt")


def _check_token_budget(values: dict, policy_loss: str) -> None:
    """Refuse flags that a token budget, or a lag, cannot be combined with."""
    flag = source_of_staleness(values)
    if policy_loss == "gspo":
        raise FlagError(f"{flag}: allowed with every --policy_loss but gspo")
    if values.get("train.agent_func_path"):
        raise FlagError(f"{flag}: cannot keep an agent's turns; allowed without --train.agent_func_path")
    if values.get("data.max_images_per_prompt"):
        raise FlagError(f"{flag}: allowed without --data.max_images_per_prompt")
    if (values.get("rollout.vllm_generate_batch_size") or 0) > values.get("rollout.batch_size", 0):
        raise FlagError(
            f"--rollout.vllm_generate_batch_size {values['rollout.vllm_generate_batch_size']}: {flag} decides how "
            f"many prompts are in flight; allowed: --rollout.batch_size {values['rollout.batch_size']}"
        )
