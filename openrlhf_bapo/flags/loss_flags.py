"""The flags of the policy loss and its clip rule, for the commands of OpenRLHF and Molt."""

import argparse
import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from openrlhf_bapo.flags.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.rules.clip_config import (
    AVERAGES,
    CONTRIBUTIONS,
    DEFAULT_PRESET,
    PRESETS,
    SCOPES,
    SEARCH_FIELDS,
    ClipConfig,
)
from openrlhf_bapo.rules.other_rules import RULES, default_settings, make_rule
from openrlhf_bapo.rules.own_rules import absolute, installed_rules, is_own_rule, located
from openrlhf_bapo.rules.settings import smoothing_config
from openrlhf_bapo.rules.staleness_weights import LEVELS

_OF_EVERY_LOSS = ("bapo.dump_tokens", "bapo.max_skipped_updates")

_HELP = {
    "policy_loss": "bapo: clip bounds recomputed for each update; {others}: the framework's; m2, divergence: the clip "
    "bounds of M2PO and DPPO; topr, balanced: weights per token instead of a clip; FILE.py:CLASS, or MODULE:CLASS of "
    "an installed package: a rule of your own, or the name of an installed one (default: {default})",
    "bapo.preset": "a set of values for the flags of this group; a flag that is given wins over it; all but steady are "
    f"published (default: {DEFAULT_PRESET})",
    "bapo.positive_contribution_target": "rho_0 in (0, 1): the search stops when tokens of positive advantage have "
    "this share of the objective; with the preset released, rho_0 is a ratio P / N",
    "bapo.ratio_lower_start": "lower clip bound at the start of the search, an importance ratio in (0, 1]",
    "bapo.ratio_lower_max": "highest lower clip bound of the search, at most 1",
    "bapo.ratio_lower_step": "step of the search for the lower clip bound",
    "bapo.ratio_upper_start": "upper clip bound at the start of the search, an importance ratio of at least 1",
    "bapo.ratio_upper_max": "highest upper clip bound of the search",
    "bapo.ratio_upper_step": "step of the search for the upper clip bound",
    "bapo.contribution": "contribution of a token to the share: surrogate (the paper's section 4.2, Eq. 8), or "
    "gradient (ours: the part that the token's gradient carries)",
    "bapo.scope": "search once per optimizer step over its tokens on all ranks, or once per micro-batch (the authors' "
    "released recipe)",
    "bapo.smoothing": "train each update with an average over past bounds, which needs no extra forward pass; the "
    "value is its half-life in optimizer steps; 0: search in each update (the paper's section 4.2, Algorithm 1)",
    "bapo.smoothing_of": "with --bapo.smoothing: average the bounds that the search finds, or the tallies that it "
    "searches",
    "bapo.smoothing_start": "with --bapo.smoothing: bounds of the first update (default: the middle of their ranges)",
    "m2.budget": "allowed mean of the squared log-ratio over the tokens that a clip would cut",
    "m2.half_life": "train each update with an average over past updates, which needs no extra forward pass; the value "
    "is its half-life in optimizer steps; 0: use the update's own tokens",
    "divergence.threshold": "leave out a token whose probability moved by more than this in the direction of its "
    "advantage; in (0, 1)",
    "topr.level": "ratio that weights a token: the token's own, or the whole response's",
    "balanced.target": "minimum share of the gradient that positive tokens carry, in (0, 1)",
    "balanced.half_life": "as --m2.half_life",
    "balanced.level": "as --topr.level",
}


class _Losses(tuple[str, ...]):
    """The names that `--policy_loss` allows, and any FILE.py:CLASS or MODULE:CLASS."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and is_own_rule(name))


def add_loss_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str], others: Collection[str], default: str
) -> argparse._ArgumentGroup:
    """Add the flags of the policy loss and its clip rule. The default None means "not given".

    Args:
        parser: the parser of the framework's command.
        argv: the command's flags, of which `--policy_loss` may name a rule of the user's own; it has flags then too.
        others: the framework's own losses, which `--policy_loss` also allows.
        default: text for `--help` that says which loss is used without `--policy_loss`.

    Returns:
        The group of `--bapo.*`.
    """
    group = parser.add_argument_group("BAPO (arXiv 2510.18927)")
    names = (*others, "bapo", *RULES)
    names += tuple(name for name in installed_rules() if name not in names)
    group.add_argument(
        "--policy_loss",
        type=functools.partial(_located, others),
        choices=_Losses(names),
        metavar=f"{{{','.join(names)},FILE.py:CLASS}}",
        help=_HELP["policy_loss"].format(others=", ".join(others), default=default),
    )
    search: dict[str, dict[str, Any]] = {
        "preset": {"choices": tuple(PRESETS)},
        "positive_contribution_target": {"type": float},
        **{name: {"type": float} for name in SEARCH_FIELDS if name.startswith("ratio_")},
        "contribution": {"choices": CONTRIBUTIONS},
        "scope": {"choices": SCOPES},
        "smoothing": {"type": float},
        "smoothing_of": {"choices": AVERAGES},
        "smoothing_start": {"type": float, "nargs": 2, "metavar": ("LOWER", "UPPER")},
    }
    for name, settings in search.items():
        group.add_argument(f"--bapo.{name}", help=_HELP[f"bapo.{name}"], **settings)
    _add_rule_flags(parser.add_argument_group("other clip rules (openrlhf_bapo/rules/other_rules.py)"))
    _add_own_rule_flags(parser, argv, others)
    return group


def _located(others: Collection[str], name: str) -> str:
    return name if name in (*others, "bapo", *RULES) else located(name)


def _add_own_rule_flags(parser: argparse.ArgumentParser, argv: Sequence[str], others: Collection[str]) -> None:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.error = parser.error
    first.add_argument("--policy_loss")
    name = first.parse_known_args([*argv])[0].policy_loss
    try:
        if name is None or not is_own_rule(name := _located(others, name)):
            return
        settings = default_settings(name)
    except ValueError as error:
        exit_with_one_line(f"--policy_loss {error}")
    group = parser.add_argument_group(f"settings of {name}")
    for setting, default in settings.items():
        kind = _truth if isinstance(default, bool) else type(default)
        group.add_argument(f"--rule.{setting}", type=kind, help=f"default: {default}")


def _truth(text: str) -> bool:
    """Read true or false."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed: true, false")
    return text.lower() == "true"


def _add_rule_flags(group: argparse._ArgumentGroup) -> None:
    for name in RULES:
        for setting, default in default_settings(name).items():
            group.add_argument(
                f"--{name}.{setting}",
                type=type(default),
                choices=LEVELS if setting == "level" else None,
                help=f"with --policy_loss {name}: {_HELP[f'{name}.{setting}']} (default: {default})",
            )


def resolve_loss_flags(values: dict, policy_loss: str) -> str:
    """Fill in the flags of the loss that were not given, in place, and refuse the first mistake.

    `values` are flags by name, with dots. Those of the framework may be missing.

    Returns:
        The loss, with the file of a rule of the user's own as an absolute path.
    """
    given = {
        name.removeprefix("bapo."): value
        for name, value in values.items()
        if name.startswith("bapo.") and name not in _OF_EVERY_LOSS and value is not None
    }
    _resolve_rule(values, policy_loss, given)
    _check_policy_loss(values, policy_loss, given)
    if policy_loss == "bapo":
        _resolve_bapo(values, given)
    return absolute(policy_loss)


def _check_policy_loss(values: dict, policy_loss: str, given: dict) -> None:
    if policy_loss != "bapo" and given:
        name, value = next(iter(given.items()))
        if name == "discard_saved":
            allowed = "--bapo.smoothing, --m2.half_life or --balanced.half_life above 0"
            raise FlagError(f"--bapo.discard_saved: there is no average to discard; allowed with {allowed}")
        raise FlagError(f"--bapo.{name} {value}: allowed only with --policy_loss bapo, not {policy_loss}")
    if values.get("actor.policy_loss_type") == "gspo" and policy_loss != "gspo":
        raise FlagError(f"--policy_loss {policy_loss}: allowed only with --actor.policy_loss_type ppo, not gspo")


def _resolve_rule(values: dict, policy_loss: str, given: dict) -> None:
    """Check the flags of the rules of other methods, and fill in those of the chosen rule.

    "discard_saved" is removed from `given`, the given flags of `--bapo.*`, if the rule has an average to discard.
    """
    own = [policy_loss] if is_own_rule(policy_loss) else []
    for name in (*RULES, *own):
        group = "rule" if name in own else name
        defaults = default_settings(name)
        settings = {setting: values[f"{group}.{setting}"] for setting in defaults}
        settings = {setting: value for setting, value in settings.items() if value is not None}
        if name != policy_loss:
            for setting, value in settings.items():
                allowed = f"allowed only with --policy_loss {name}, not {policy_loss}"
                raise FlagError(f"--{name}.{setting} {value}: {allowed}")
            continue
        try:
            rule = make_rule(name, settings)
        except ValueError as error:
            raise FlagError(f"--policy_loss {error}" if own else f"--{name}.{error}") from None
        reason = "m2 and divergence have their own bounds, topr and balanced none"
        _check_no_clip(values, name, "a rule of one's own has its own bounds or weights" if own else reason)
        if rule.has_weights:
            _check_weights(values, name)
        if rule.follows_updates:
            given.pop("discard_saved", None)
        values |= {f"{group}.{setting}": value for setting, value in (defaults | settings).items()}


def _check_no_clip(values: dict, policy_loss: str, reason: str) -> None:
    """Refuse the framework's clip bounds, which have no effect with a clip rule."""
    both, one = values.get("actor.eps_clip_low_high"), values.get("actor.eps_clip", 0.2)
    if both is not None or one != 0.2:
        given = f"eps_clip {one}" if both is None else f"eps_clip_low_high {' '.join(map(str, both))}"
        raise FlagError(f"--actor.{given}: not allowed with --policy_loss {policy_loss}: {reason}")


def _check_weights(values: dict, policy_loss: str) -> None:
    """Refuse flags that cannot be combined with weights in place of a clip."""
    if (dual_clip := values.get("actor.dual_clip")) is not None:
        reason = f"has no effect with --policy_loss {policy_loss}, which has weights in place of the ratio"
        raise FlagError(f"--actor.dual_clip {dual_clip}: {reason}; allowed with ppo, bapo, m2, divergence")
    if (level := values.get("algo.advantage.is_correction_level", "off")) != "off":
        reason = f"would weigh tokens a second time; allowed with --policy_loss {policy_loss}: off"
        raise FlagError(f"--algo.advantage.is_correction_level {level}: {reason}")


def _resolve_bapo(values: dict, given: dict) -> None:
    """Check the flags of the search and fill in the preset's values for those that are not in `given`."""
    _check_no_clip(values, "bapo", "its bounds come from --bapo.ratio_lower_start/max and --bapo.ratio_upper_start/max")
    preset_name = given.pop("preset", DEFAULT_PRESET)
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
    resolved = {name: getattr(config, name) for name in (*SEARCH_FIELDS, "scope")}
    resolved |= {"preset": preset_name, "token_weight": token_weight, "smoothing": half_life, **smoothing}
    values.update({f"bapo.{name}": value for name, value in resolved.items()})


def _check_smoothing(config: ClipConfig, half_life: float, given: dict) -> None:
    if not 0 <= half_life < math.inf:
        raise FlagError(f"--bapo.smoothing {half_life}: not a half-life in optimizer steps; allowed: 0 and above")
    if half_life == 0:
        for name, value in given.items():
            raise FlagError(f"--bapo.{name} {value}: allowed only with --bapo.smoothing above 0")
        return
    if config.scope != "update":
        allowed = f"--bapo.scope update, not {config.scope}"
        raise FlagError(f"--bapo.smoothing {half_life}: follows updates; allowed with {allowed}")
    try:
        replace(config, smoothing=smoothing_config(half_life, given))
    except ValueError as error:
        raise FlagError(f"--bapo.{error}") from None
