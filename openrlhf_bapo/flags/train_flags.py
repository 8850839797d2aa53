"""Our flags beside OpenRLHF's: their definitions, their checks before anything starts, and their resolved values."""

import argparse
from argparse import Namespace
from collections.abc import Sequence, Set
from dataclasses import fields
from typing import Any

from openrlhf_bapo.flags.loss_flags import add_loss_flags, resolve_loss_flags
from openrlhf_bapo.flags.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.flags.values import check_values
from openrlhf_bapo.offpolicy.partial_rollouts import ON_STALE, PartialConfig
from openrlhf_bapo.offpolicy.replay_pool import STRATEGIES, ReplayConfig
from openrlhf_bapo.openrlhf.settings import ESTIMATORS_OVER_SAMPLES, TOKEN_WEIGHTS
from openrlhf_bapo.rules.other_rules import rule_class
from openrlhf_bapo.rules.staleness_weights import LEVELS, WEIGHTS

_CORRECTION_CAP = 2.0
"""Highest weight of a token with `--offpolicy.weight capped`."""

_CORRECTION = "algo.advantage.is_correction_"

_UNCUT = 2**31 - 1
"""A token budget that no response can use up."""

SETTINGS = {"replay": ReplayConfig, "partial": PartialConfig}
"""The classes whose fields are the flags of a group. The first field switches the group on."""

_CHOICES = {"replay.strategy": STRATEGIES, "partial.on_stale": ON_STALE}

_HELP = {
    "bapo.token_weight": "weight of a token in the search: none, or its probability under the rollout policy (as "
    "section 4.2 of the paper prints Eq. 8)",
    "bapo.discard_saved": "with --ckpt.load_enable: start the average of --bapo.smoothing, --m2.half_life or "
    "--balanced.half_life again instead of loading it",
    "bapo.dump_tokens": "write a sample of the tokens trained on every N global steps, for `openrlhf-bapo tokens` "
    "(default: off)",
    "bapo.max_skipped_updates": "how many optimizer steps in a row may be skipped because their loss or gradient is "
    "not finite; for every policy loss (default: 3)",
    "offpolicy.ratio_base": "denominator of the importance ratio for fresh samples: log-probs recomputed by the actor "
    "(as OpenRLHF does), or the rollout engine's; auto: the engine's in async training and for tokens of an older "
    "version, else recomputed (default: auto with a clip rule, replay, a token budget or a lag, and in async training "
    "with ppo without IS correction; recomputed with --offpolicy.objective decoupled; else as in OpenRLHF)",
    "offpolicy.objective": "behavior: the ratio is against the policy that generated the token; decoupled: it is "
    "against the policy that the training step starts from, and --offpolicy.weight corrects for the rest (default: "
    "behavior)",
    "offpolicy.weight": "with --offpolicy.objective decoupled, the weight of a token's loss by s, the probability "
    "under the policy that the training step starts from over that under the policy that generated it; capped: "
    "min(s, 2), or --algo.advantage.is_correction_threshold; masked: s, or 0 outside [0.5, 5]; tapered: 1 where the "
    "advantage is positive, min(s, 1) elsewhere; fresh tokens have s = 1 with tapered (default: capped)",
    "offpolicy.weight_level": "with --offpolicy.weight masked or tapered: s of the token, or of the whole response; "
    "tapered takes the product over the response's tokens; masked keeps a response by its geometric mean, and weighs "
    "each token by its own s (default: token with masked, sequence with tapered)",
    "offpolicy.lag": "train on each rollout N rollouts after it was generated, for studies of exact staleness (sync "
    "training only; default: 0)",
    "replay.ratio": "replayed groups per fresh group; 0: off",
    "replay.capacity": "highest number of groups in the pool",
    "replay.max_staleness": "highest staleness of a replayed group, in policy versions",
    "replay.max_reuse": "how many times a group may be replayed",
    "replay.strategy": "how groups are drawn; advantage: with probabilities proportional to their mean absolute "
    "advantage",
    "replay.skip_uninformative": "leave groups with equal rewards out of the pool (default: on where the advantages "
    "compare the responses to a prompt)",
    "replay.seed": "seed of the draws from the pool",
    "replay.discard_saved": "with --ckpt.load_enable: start with an empty pool",
    "partial.token_budget": "tokens by which a response may grow in one rollout; it continues in a later one; 0: off",
    "partial.oversample": "prompt groups in flight per group that a rollout needs",
    "partial.max_segments": "highest number of rollouts that may write one response; 0: any number",
    "partial.max_staleness": "highest staleness of a finished group's oldest token, in policy versions",
    "partial.on_stale": "for a response that would become too old, or exceed --partial.max_segments: drop its group, "
    "or finish the response early, as truncated",
    "partial.discard_saved": "with --ckpt.load_enable: start without the saved unfinished responses and samples that "
    "wait",
    "reward_fault.patience": "seconds during which a reward call is repeated while its servers do not answer; 0: no "
    "repeat (default: 600)",
    "reward_fault.timeout": "seconds to wait for one answer of a reward server or function (default: 300)",
    "reward_fault.max_drop_rate": "share of a batch's prompt groups that may be dropped because they have no reward; "
    "0: none (default: 0.1)",
    "ckpt.on_interrupt": "on SIGTERM or Ctrl-C, finish the training step and write a checkpoint; a second signal ends "
    "the run at once",
    "eval.at_start": "also evaluate before the first update, logged as step 0",
}


def add_flags(parser: argparse.ArgumentParser, argv: Sequence[str] = ()) -> None:
    """Add our flags to OpenRLHF's parser, and those of a rule of the user's own that `argv` names.

    The default None means "not given": `resolve_flags` then takes the preset's value.
    """
    for action in parser._actions:
        if action.dest == "ds.param_dtype":
            action.choices = [*(action.choices or ()), "fp32"]
            action.help = "type of all models, engines too (default: bf16; on a CPU fp32, which is for CPUs only)"
    group = add_loss_flags(parser, argv, ("ppo", "gspo"), "--actor.policy_loss_type")
    _add(group, "bapo.token_weight", choices=TOKEN_WEIGHTS)
    _add(group, "bapo.discard_saved", action="store_true", default=None)
    _add(group, "bapo.dump_tokens", type=int)
    _add(group, "bapo.max_skipped_updates", type=int, default=3)
    group = parser.add_argument_group("off-policy data")
    _add(group, "offpolicy.ratio_base", choices=("auto", "recomputed", "rollout"))
    _add(group, "offpolicy.objective", choices=("behavior", "decoupled"), default="behavior")
    _add(group, "offpolicy.weight", choices=WEIGHTS)
    _add(group, "offpolicy.weight_level", choices=LEVELS)
    _add(group, "offpolicy.lag", type=int, default=0)
    _add_settings_flags(group, "replay")
    _add_settings_flags(parser.add_argument_group("partial rollouts with a token budget"), "partial")
    group = parser.add_argument_group("rewards that fail")
    _add(group, "reward_fault.patience", type=float, default=600.0)
    _add(group, "reward_fault.timeout", type=float, default=300.0)
    _add(group, "reward_fault.max_drop_rate", type=float, default=0.1)
    _add(parser, "ckpt.on_interrupt", action=argparse.BooleanOptionalAction, default=True)
    _add(parser, "eval.at_start", action="store_true")


def _add(group: argparse._ActionsContainer, flag: str, shown_default: str = "", **settings: Any) -> None:
    group.add_argument(f"--{flag}", help=_HELP[flag] + shown_default, **settings)


def _add_settings_flags(group: argparse._ArgumentGroup, name: str) -> None:
    """Add a flag per field of a group's settings, and the one that discards its saved state."""
    for field in fields(SETTINGS[name]):
        flag, default = f"{name}.{field.name}", field.default
        if isinstance(default, bool):
            _add(group, flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            shown_default = f" (default: {default})"
            _add(group, flag, shown_default, type=type(default), choices=_CHOICES.get(flag), default=default)
    _add(group, f"{name}.discard_saved", action="store_true")


def check_flags(argv: list[str]) -> Namespace:
    """Return our flags and the two that name a Python file, flat; a mistake exits with code 2, before slow imports."""
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
    """Fill in our flags that were not given, in place, and refuse the first mistake.

    Args:
        args: flat, names with dots as argparse leaves them. OpenRLHF's may be missing (see `check_flags`).
        given_names: the flags of OpenRLHF's on the command line.
    """
    values = vars(args)
    check_values(values)
    policy_loss = args.policy_loss or values.get("actor.policy_loss_type", "ppo")
    policy_loss = resolve_loss_flags(values, policy_loss)
    _resolve_lag(values)
    _fill_in_objective(values, policy_loss, given_names)
    _check_off_policy(values, policy_loss)
    values["offpolicy.ratio_base"] = _ratio_base(values, policy_loss)
    _check_dump_tokens(values, policy_loss)
    if values["replay.ratio"] and values.get("algo.advantage.estimator") not in ESTIMATORS_OVER_SAMPLES:
        # Equal rewards of a prompt's responses are then no reason for advantages of 0.
        values["replay.skip_uninformative"] &= "replay.skip_uninformative" in given_names
    args.policy_loss = policy_loss
    if values.get("ds.lora.target_modules") == ["all-linear"]:
        values["ds.lora.target_modules"] = "all-linear"  # PEFT looks for modules of this name if it is in a list
    values["actor.policy_loss_type"] = "gspo" if policy_loss == "gspo" else "ppo"
    is_logged = policy_loss not in ("ppo", "gspo") or values["bapo.dump_tokens"]
    if is_logged and values.get("actor.entropy_coef") is None:
        values["actor.entropy_coef"] = 0.0  # logs the entropy, which a clip rule should keep; no bonus


def _check_dump_tokens(values: dict, policy_loss: str) -> None:
    if (every := values["bapo.dump_tokens"]) and (policy_loss == "gspo" or values["offpolicy.ratio_base"] is None):
        allowed = "every --policy_loss but gspo, and with ppo only if --offpolicy.ratio_base is given"
        reason = f"needs the ratio and the staleness of each token; allowed with {allowed}; this run has {policy_loss}"
        raise FlagError(f"--bapo.dump_tokens {every}: {reason}")


def _resolve_lag(values: dict) -> None:
    """Turn a lag into a token budget that is never used up. Its rollouts then wait like unfinished responses."""
    if not (lag := values["offpolicy.lag"]):
        return
    if values.get("train.async_enable"):
        raise FlagError(f"--offpolicy.lag {lag}: allowed only without --train.async_enable, which has its own queue")
    for field in fields(PartialConfig):
        if (value := values[f"partial.{field.name}"]) != field.default:
            raise FlagError(f"--partial.{field.name} {value}: allowed without --offpolicy.lag, which is {lag}")
    values |= {"partial.token_budget": _UNCUT, "partial.oversample": 1.0, "partial.max_staleness": lag}


def _fill_in_objective(values: dict, policy_loss: str, given_names: Set[str]) -> None:
    """Fill in the parts of the objective that are not given: the ratio's denominator, and the weight."""
    objective, weight, level = (values[f"offpolicy.{name}"] for name in ("objective", "weight", "weight_level"))
    flag = f"--offpolicy.objective {objective}"
    if objective == "behavior":
        for name, value in (("weight", weight), ("weight_level", level)):
            if value not in (None, "none"):
                reason = f"would count staleness twice with {flag}, whose ratio has it"
                raise FlagError(f"--offpolicy.{name} {value}: {reason}; allowed with --offpolicy.objective decoupled")
        values["offpolicy.weight"] = "none"
        return
    if policy_loss == "gspo" or (policy_loss not in ("ppo", "bapo") and rule_class(policy_loss).has_weights):
        allowed = f"--policy_loss ppo, bapo, m2 or divergence, not {policy_loss}"
        raise FlagError(f"{flag}: clips each token's ratio; allowed with {allowed}")
    if values["offpolicy.ratio_base"] == "rollout":
        raise FlagError(f"--offpolicy.ratio_base rollout: allowed with {flag}: auto, recomputed")
    values["offpolicy.ratio_base"] = "recomputed"
    if level and weight not in ("masked", "tapered"):
        allowed = f"--offpolicy.weight masked or tapered, not {weight}"
        raise FlagError(f"--offpolicy.weight_level {level}: allowed with {allowed}")
    if weight not in ("none", "tapered"):
        _fill_in_correction(values, weight, level, given_names)
    elif (correction := _correction_level(values)) != "off":
        allowed = f"allowed with --offpolicy.weight {weight}: off"
        raise FlagError(f"--{_CORRECTION}level {correction}: weighs tokens too; {allowed}")
    elif weight == "tapered":
        values["offpolicy.weight_level"] = level or "sequence"


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
    if base is None and is_async_ppo and _correction_level(values) != "off":
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


def _correction_level(values: dict) -> str:
    return values.get(f"{_CORRECTION}level", "off")


def _check_off_policy(values: dict, policy_loss: str) -> None:
    """Check `--offpolicy.ratio_base`, `--replay.*` and `--partial.*`."""
    for group, kind in SETTINGS.items():
        try:
            kind(**{field.name: values[f"{group}.{field.name}"] for field in fields(kind)})
        except ValueError as error:
            raise FlagError(f"--{group}.{error}") from None
    level, base = _correction_level(values), _ratio_base(values, policy_loss)
    source = source_of_staleness(values)
    is_decoupled = values["offpolicy.objective"] == "decoupled"
    if base == "recomputed" and source and policy_loss != "ppo" and not is_decoupled:
        allowed = "auto, rollout; also recomputed with --policy_loss ppo, or with --offpolicy.objective decoupled"
        raise FlagError(f"--offpolicy.ratio_base recomputed: hides the staleness of {source}; allowed: {allowed}")
    if base in ("rollout", "auto") and level != "off":
        raise FlagError(
            f"--algo.advantage.is_correction_level {level}: counts the mismatch of trainer and engine a second time; "
            f"allowed with {source or '--offpolicy.ratio_base rollout'}: off; also token, seq with "
            "--offpolicy.objective decoupled, or with --policy_loss ppo and --offpolicy.ratio_base recomputed"
        )
    needs_tokens = {
        "--offpolicy.ratio_base rollout": base == "rollout",
        source: values["partial.token_budget"],
        f"--replay.ratio {values['replay.ratio']}": values["replay.ratio"],
    }
    for flag, is_given in needs_tokens.items():
        if is_given and policy_loss == "gspo":
            raise FlagError(f"{flag}: allowed with every --policy_loss but gspo")
