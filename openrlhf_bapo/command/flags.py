"""Our flags beside OpenRLHF's: their definition, and their checks before anything starts."""

import argparse
import math
import sys
from argparse import Namespace
from dataclasses import fields, replace
from typing import NoReturn

from openrlhf_bapo.core.clip_config import AVERAGES, CONTRIBUTIONS, PRESETS, SCOPES, SEARCH_FIELDS, ClipConfig
from openrlhf_bapo.core.partial_rollouts import ON_STALE, PartialConfig
from openrlhf_bapo.core.replay_pool import STRATEGIES, ReplayConfig
from openrlhf_bapo.openrlhf.settings import TOKEN_WEIGHTS, smoothing_config

POLICY_LOSSES = ("ppo", "gspo", "bapo")
RATIO_BASES = ("auto", "recomputed", "rollout")

_UNCUT = 2**31 - 1
"""A token budget that no response spends."""

_OFF_POLICY_GROUPS = ((ReplayConfig, "replay"), (PartialConfig, "partial"))

_BOUND_HELP = {
    "ratio_lower_start": "lower clip bound before any raise, an importance ratio in (0, 1]",
    "ratio_lower_max": "highest lower clip bound, at most 1",
    "ratio_lower_step": "one raise of the lower clip bound",
    "ratio_upper_start": "upper clip bound before any raise, at least 1",
    "ratio_upper_max": "highest upper clip bound",
    "ratio_upper_step": "one raise of the upper clip bound",
}

_REPLAY_HELP = {
    "ratio": "replayed groups per fresh group; 0: off",
    "capacity": "the most groups kept",
    "max_staleness": "the highest staleness of a replayed group, in policy versions",
    "max_reuse": "how many times a group may be replayed",
    "seed": "of the draws",
}

_REWARD_FAULT_HELP = {
    "patience": (600.0, "seconds for which a reward call is tried again while its servers are away; 0: not at all"),
    "timeout": (300.0, "seconds for one answer of a reward server or function"),
    "max_drop_rate": (0.1, "share of a batch's prompt groups that may be dropped without a reward; 0: none"),
}

_PARTIAL_HELP = {
    "token_budget": "tokens that a response may grow by in one rollout, to go on in a later one; 0: off",
    "oversample": "prompt groups in flight per group that a rollout needs",
    "max_segments": "the most rollouts that may write a response; 0: any number",
    "max_staleness": "the highest staleness of a group's oldest token at hand-over, in policy versions",
}


class FlagError(ValueError):
    """A user's mistake, in one line that names the flag, its value and what is allowed."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags. A default of None means "not given": the preset decides, and `resolve_flags` fills it in."""
    group = parser.add_argument_group("BAPO (arXiv 2510.18927)")
    group.add_argument(
        "--policy_loss",
        choices=POLICY_LOSSES,
        default=None,
        help="bapo: clip bounds found for every update; ppo, gspo: OpenRLHF's own (default: --actor.policy_loss_type)",
    )
    group.add_argument("--bapo.preset", choices=tuple(PRESETS), default=None, help="published settings (readme)")
    group.add_argument(
        "--bapo.positive_contribution_target",
        type=float,
        default=None,
        help="rho_0, the least share of the objective that positive tokens carry, in (0, 1); released: the least P / N",
    )
    for name, text in _BOUND_HELP.items():
        group.add_argument(f"--bapo.{name}", type=float, default=None, help=text)
    group.add_argument(
        "--bapo.contribution",
        choices=CONTRIBUTIONS,
        default=None,
        help="what a token contributes: surrogate (the paper's Eq. 8) or gradient (what its gradient carries)",
    )
    group.add_argument(
        "--bapo.scope",
        choices=SCOPES,
        default=None,
        help="bounds from the whole optimizer step on all ranks, or per micro-batch (as in the released recipe)",
    )
    group.add_argument(
        "--bapo.token_weight",
        choices=TOKEN_WEIGHTS,
        default=None,
        help="weight of a token in the search: none, or its probability at rollout (as the paper writes Eq. 8)",
    )
    group.add_argument(
        "--bapo.smoothing",
        type=float,
        default=None,
        help="half-life, in optimizer steps, of the average over past bounds that an update is trained with, which "
        "takes no forward of its own; 0: bounds anew in every update (the paper)",
    )
    group.add_argument(
        "--bapo.smoothing_of",
        choices=AVERAGES,
        default=None,
        help="with --bapo.smoothing: average the bounds that the search finds, or the tallies that it runs on",
    )
    group.add_argument(
        "--bapo.smoothing_start",
        type=float,
        nargs=2,
        metavar=("LOWER", "UPPER"),
        default=None,
        help="with --bapo.smoothing: bounds of the first update (the middle of their ranges)",
    )
    group.add_argument(
        "--bapo.discard_saved",
        action="store_true",
        default=None,
        help="with --ckpt.load_enable: start --bapo.smoothing anew",
    )
    group.add_argument(
        "--bapo.dump_tokens",
        type=int,
        default=None,
        help="every so many global steps, write a sample of the tokens trained on, for `openrlhf-bapo tokens` (0: off)",
    )
    group.add_argument(
        "--bapo.max_skipped_updates",
        type=int,
        default=3,
        help="the most optimizer steps in a row that may be skipped because their loss or gradient is not finite, with "
        "any policy loss (3)",
    )
    group = parser.add_argument_group("off-policy data")
    group.add_argument(
        "--offpolicy.ratio_base",
        choices=RATIO_BASES,
        default=None,
        help="the ratio's denominator for fresh samples: recomputed by the actor (as OpenRLHF does), or the rollout "
        "engine's own; auto (with bapo the default): rollout in async training, else recomputed",
    )
    group.add_argument(
        "--offpolicy.lag",
        type=int,
        default=0,
        help="train every rollout so many rollouts after it was made (sync training): exact staleness, for studies (0)",
    )
    defaults = ReplayConfig()
    for name, text in _REPLAY_HELP.items():
        default = getattr(defaults, name)
        group.add_argument(f"--replay.{name}", type=type(default), default=default, help=f"{text} ({default})")
    group.add_argument(
        "--replay.strategy",
        choices=STRATEGIES,
        default=defaults.strategy,
        help="which groups are drawn (advantage: with probability by mean absolute advantage)",
    )
    group.add_argument(
        "--replay.skip_uninformative",
        action=argparse.BooleanOptionalAction,
        default=defaults.skip_uninformative,
        help="keep no groups whose rewards are all equal",
    )
    group.add_argument(
        "--replay.discard_saved", action="store_true", help="with --ckpt.load_enable: start with an empty pool"
    )
    group = parser.add_argument_group("partial rollouts with a token budget")
    defaults = PartialConfig()
    for name, text in _PARTIAL_HELP.items():
        default = getattr(defaults, name)
        group.add_argument(f"--partial.{name}", type=type(default), default=default, help=f"{text} ({default})")
    group.add_argument(
        "--partial.on_stale",
        choices=ON_STALE,
        default=defaults.on_stale,
        help="a response that would grow too old: drop its group, or finish it where it is, as truncated",
    )
    group.add_argument(
        "--partial.discard_saved",
        action="store_true",
        help="with --ckpt.load_enable: start without the saved unfinished responses",
    )
    group = parser.add_argument_group("rewards that fail")
    for name, (default, text) in _REWARD_FAULT_HELP.items():
        group.add_argument(f"--reward_fault.{name}", type=float, default=default, help=f"{text} ({default:g})")
    parser.add_argument(
        "--ckpt.on_interrupt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="SIGTERM and Ctrl-C finish the training step and write a checkpoint; a second signal ends at once",
    )
    parser.add_argument(
        "--eval.at_start",
        action="store_true",
        help="also evaluate before the first update, logged as step 0 (sync training)",
    )


def check_flags(argv: list[str]) -> None:
    """Refuse what is wrong in our flags alone, before OpenRLHF's slow imports; exits with code 2."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = exit_with_one_line
    add_flags(parser)
    try:
        resolve_flags(parser.parse_known_args(argv)[0])
    except FlagError as error:
        parser.error(str(error))


def resolve_flags(args: Namespace) -> None:
    """Check our flags and fill in what was not given, in place.

    Args:
        args: flat, names with dots as argparse leaves them. OpenRLHF's may be missing (see `check_flags`).

    Raises:
        FlagError: at the first mistake.
    """
    values = vars(args)
    bapo = {name.removeprefix("bapo."): value for name, value in values.items() if name.startswith("bapo.")}
    dump_tokens = bapo.pop("dump_tokens") or 0
    if (most := bapo.pop("max_skipped_updates")) < 0:
        raise FlagError(f"--bapo.max_skipped_updates {most}: allowed: 0 or more")
    given = {name: value for name, value in bapo.items() if value is not None}
    upstream_loss = values.get("actor.policy_loss_type", "ppo")
    policy_loss = args.policy_loss or upstream_loss

    if policy_loss != "bapo" and given:
        name, value = next(iter(given.items()))
        raise FlagError(f"--bapo.{name} {value}: allowed only with --policy_loss bapo, which is {policy_loss}")
    if upstream_loss == "gspo" and policy_loss != "gspo":
        raise FlagError(f"--policy_loss {policy_loss}: allowed with --actor.policy_loss_type ppo, which is gspo")
    if values["eval.at_start"] and values.get("train.async_enable"):
        raise FlagError("--eval.at_start: allowed only without --train.async_enable")
    _check_reward_faults(values)
    _resolve_off_policy(values, policy_loss)
    _check_dump_tokens(values, dump_tokens, policy_loss)
    args.policy_loss = policy_loss
    values["actor.policy_loss_type"] = "gspo" if policy_loss == "gspo" else "ppo"
    if policy_loss != "bapo":
        return

    if values.get("actor.eps_clip_low_high") is not None or values.get("actor.eps_clip", 0.2) != 0.2:
        raise FlagError(
            "--actor.eps_clip and --actor.eps_clip_low_high: not allowed with --policy_loss bapo, which finds the clip "
            "bounds between --bapo.ratio_lower_start/max and --bapo.ratio_upper_start/max"
        )
    preset_name = given.pop("preset", "readme")
    preset = ClipConfig.preset(preset_name)
    token_weight = given.pop("token_weight", "none")
    of_smoothing = ("smoothing_of", "smoothing_start", "discard_saved")
    smoothing = {name: given.pop(name) for name in of_smoothing if name in given}
    if half_life := given.pop("smoothing", preset.smoothing.half_life if preset.smoothing else 0.0):
        smoothing = {"smoothing_of": "bounds", **smoothing}
    try:
        config = replace(preset, smoothing=None, **given)
    except ValueError as error:
        raise FlagError(f"--bapo.{error}") from None
    _check_smoothing(config, half_life, smoothing)

    if values.get("actor.dual_clip") is None:
        values["actor.dual_clip"] = config.dual_clip
    if values.get("actor.entropy_coef") is None:
        values["actor.entropy_coef"] = 0.0  # log the entropy, which BAPO is there to keep; no bonus
    resolved = {name: getattr(config, name) for name in (*SEARCH_FIELDS, "scope")}
    resolved |= {"preset": preset_name, "token_weight": token_weight, "smoothing": half_life, **smoothing}
    values.update({f"bapo.{name}": value for name, value in resolved.items()})


def _check_reward_faults(values: dict) -> None:
    for name, allowed, holds in (
        ("patience", "0 or more seconds", lambda value: 0 <= value < math.inf),
        ("timeout", "seconds above 0", lambda value: 0 < value < math.inf),
        ("max_drop_rate", "from 0, below 1", lambda value: 0 <= value < 1),
    ):
        if not holds(value := values[f"reward_fault.{name}"]):
            raise FlagError(f"--reward_fault.{name} {value:g}: allowed: {allowed}")


def _check_smoothing(config: ClipConfig, half_life: float, given: dict) -> None:
    if not 0 <= half_life < math.inf:
        raise FlagError(f"--bapo.smoothing {half_life}: not a half-life in optimizer steps; allowed: 0 and above")
    if half_life == 0:
        if given:
            name, value = next(iter(given.items()))
            raise FlagError(f"--bapo.{name} {value}: allowed only with --bapo.smoothing above 0")
        return
    if config.scope != "update":
        raise FlagError(
            f"--bapo.smoothing {half_life}: follows updates; allowed with --bapo.scope update, not {config.scope}"
        )
    try:
        replace(config, smoothing=smoothing_config(half_life, given))
    except ValueError as error:
        raise FlagError(f"--bapo.{error}") from None


def _check_dump_tokens(values: dict, every: int, policy_loss: str) -> None:
    if every < 0:
        raise FlagError(f"--bapo.dump_tokens {every}: a number of global steps; allowed: 0 (off) and above")
    if every and (policy_loss == "gspo" or values["offpolicy.ratio_base"] is None):
        raise FlagError(
            f"--bapo.dump_tokens {every}: wants every token's ratio and staleness; allowed with --policy_loss bapo, or "
            f"ppo and --offpolicy.ratio_base, which is {policy_loss}"
        )
    if every and values.get("actor.entropy_coef") is None:
        values["actor.entropy_coef"] = 0.0  # to log the entropy, no bonus


def _resolve_off_policy(values: dict, policy_loss: str) -> None:
    """Check `--offpolicy.*`, `--replay.*` and `--partial.*`.

    Leaves ratio_base "recomputed", "rollout", or None for OpenRLHF's way.
    """
    if lag := values["offpolicy.lag"]:
        _resolve_lag(values, lag)
    replay, partial = (_config(kind, values, group) for kind, group in _OFF_POLICY_GROUPS)
    base = values["offpolicy.ratio_base"]
    is_async = values.get("train.async_enable", False)
    if base is None and (policy_loss == "bapo" or replay.ratio or partial.token_budget):
        base = "auto"
    if base == "recomputed" and partial.token_budget:
        flag = "--offpolicy.lag" if lag else "--partial.token_budget"
        raise FlagError(f"--offpolicy.ratio_base recomputed: hides the staleness of {flag}; allowed: auto, rollout")
    if base == "recomputed" and is_async:
        raise FlagError(
            "--offpolicy.ratio_base recomputed: hides the staleness of --train.async_enable; allowed: auto, rollout"
        )
    if base == "auto":
        base = "rollout" if is_async else "recomputed"
    values["offpolicy.ratio_base"] = base

    level = values.get("algo.advantage.is_correction_level", "off")
    if base == "rollout" and level != "off":
        raise FlagError(
            f"--algo.advantage.is_correction_level {level}: counts the mismatch of trainer and engine a second time; "
            "allowed with a ratio against the rollout engine (async training, or --offpolicy.ratio_base rollout): off"
        )
    if base == "rollout" and policy_loss == "gspo":
        raise FlagError("--offpolicy.ratio_base rollout: allowed with --policy_loss ppo or bapo, which is gspo")
    if partial.token_budget:
        _check_token_budget(values, partial.token_budget, policy_loss, level)
    if not replay.ratio:
        return
    if policy_loss == "gspo":
        raise FlagError(f"--replay.ratio {replay.ratio}: allowed with --policy_loss ppo or bapo, which is gspo")
    num_samples, size = values.get("rollout.n_samples_per_prompt"), values.get("train.batch_size")
    if num_samples is None:
        return  # OpenRLHF's flags are not known yet
    if num_samples == 1 and replay.skip_uninformative:
        raise FlagError(
            "--replay.skip_uninformative: skips every group of --rollout.n_samples_per_prompt 1; allowed: "
            "--no-replay.skip_uninformative"
        )
    if values["rollout.batch_size"] * num_samples % size:
        raise FlagError(
            f"--train.batch_size {size}: with --replay.ratio it must divide --rollout.batch_size x "
            f"--rollout.n_samples_per_prompt, which is {values['rollout.batch_size'] * num_samples}"
        )
    num_drawn, least = round(replay.ratio * values["rollout.batch_size"]), size // math.gcd(size, num_samples)
    if num_drawn < least:
        raise FlagError(
            f"--replay.ratio {replay.ratio}: draws {num_drawn} groups a training step; allowed: what draws at least "
            f"{least}, which make whole optimizer steps of --train.batch_size {size}"
        )
    if values["data.max_images_per_prompt"]:
        raise FlagError(f"--replay.ratio {replay.ratio}: allowed without --data.max_images_per_prompt")


def _resolve_lag(values: dict, lag: int) -> None:
    """Rollouts that wait are a token budget that nothing spends."""
    if lag < 0:
        raise FlagError(f"--offpolicy.lag {lag}: a number of rollouts; allowed: 0 and above")
    if values.get("train.async_enable"):
        raise FlagError(f"--offpolicy.lag {lag}: allowed without --train.async_enable, which has a queue of its own")
    defaults = PartialConfig()
    for name in ("token_budget", "oversample", "max_segments", "max_staleness", "on_stale"):
        if (value := values[f"partial.{name}"]) != getattr(defaults, name):
            raise FlagError(f"--partial.{name} {value}: allowed without --offpolicy.lag, which is {lag}")
    values |= {"partial.token_budget": _UNCUT, "partial.oversample": 1.0, "partial.max_staleness": lag}


def _check_token_budget(values: dict, token_budget: int, policy_loss: str, is_correction_level: str) -> None:
    """Refuse what a token budget, or a lag, cannot go with."""
    lag = values["offpolicy.lag"]
    flag = f"--offpolicy.lag {lag}" if lag else f"--partial.token_budget {token_budget}"
    if policy_loss == "gspo":
        raise FlagError(f"{flag}: allowed with --policy_loss ppo or bapo, which is gspo")
    if is_correction_level != "off":
        raise FlagError(
            f"--algo.advantage.is_correction_level {is_correction_level}: counts the mismatch of trainer and engine a "
            f"second time in resumed responses; allowed with {flag}: off"
        )
    if values.get("train.agent_func_path"):
        raise FlagError(f"{flag}: an agent's turns cannot be kept; allowed without --train.agent_func_path")
    if values.get("data.max_images_per_prompt"):
        raise FlagError(f"{flag}: allowed without --data.max_images_per_prompt")
    if (values.get("rollout.vllm_generate_batch_size") or 0) > values.get("rollout.batch_size", 0):
        raise FlagError(
            f"--rollout.vllm_generate_batch_size {values['rollout.vllm_generate_batch_size']}: {flag} says how many "
            f"prompts are in flight; allowed: --rollout.batch_size {values['rollout.batch_size']}"
        )


def _config(kind: type, values: dict, group: str):
    try:
        return kind(**{field.name: values[f"{group}.{field.name}"] for field in fields(kind)})
    except ValueError as error:
        raise FlagError(f"--{group}.{error}") from None


def exit_with_one_line(message: str) -> NoReturn:
    """For `parser.error`: argparse would print the usage of 200 flags before the message."""
    sys.stderr.write(f"openrlhf-bapo: {message}\n")
    sys.exit(2)
