"""Clip rules that are not in this package, by where they are: FILE.py:CLASS, or MODULE:CLASS of an installed package.

    --policy_loss my_rule.py:MyRule --rule.high 2

An installed package can also give its rule a name, by an entry point of the group "openrlhf_bapo.rules".

Its class is a `ClipRule`, such as a `WeightRule`. The parameters of its constructor are its settings; each has a
default.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from openrlhf_bapo.rules.clip_rules import ClipRule, FixedBounds, SearchedBounds, SteadyBounds, Tokens, UpdateBounds

_TYPES = (bool, int, float, str)

_GROUP = "openrlhf_bapo.rules"


def is_own_rule(name: str) -> bool:
    """Say whether a name is FILE.py:CLASS or MODULE:CLASS."""
    return ":" in name


def installed_rules() -> tuple[str, ...]:
    """Return the names of the rules that installed packages have entry points for."""
    return tuple(sorted(entry_points(group=_GROUP).names))


def located(name: str) -> str:
    """Return MODULE:CLASS for the name of an installed rule; any other name stays as it is.

    Raises:
        ValueError: in one line, if packages have different rules of this name.
    """
    found = {f"{entry.module}:{entry.attr or ''}" for entry in entry_points(group=_GROUP, name=name)}
    if len(found) > 1:
        raise ValueError(f"{name}: several installed rules have this name; allowed: {', '.join(sorted(found))}")
    return found.pop() if found else name


def absolute(name: str) -> str:
    """Return the same rule for a process that may run in another folder."""
    where, _, class_name = name.rpartition(":")
    return f"{Path(where).resolve()}:{class_name}" if where.endswith(".py") else name


def load_own_rule(name: str) -> type[ClipRule]:
    """Return the class.

    Raises:
        ValueError: in one line, if there is no such file, module or class, or if the class is no rule.
    """
    where, _, class_name = name.rpartition(":")
    if where.endswith(".py") and not Path(where).is_file():
        raise ValueError(f"{name}: no file {where}")
    found = getattr(_module(absolute(name).rpartition(":")[0]), class_name, None)
    if not isinstance(found, type):
        raise ValueError(f"{name}: {where} has no class {class_name!r}")
    if not issubclass(found, ClipRule):
        raise ValueError(f"{name}: {class_name} is no subclass of openrlhf_bapo.ClipRule")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ValueError(f"{name}: {class_name} lacks the method {missing[0]}")
    own_settings(found)
    return found


@functools.cache
def _module(where: str) -> ModuleType:
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        name = f"openrlhf_bapo rule {where}"  # no other module's
        spec = importlib.util.spec_from_file_location(name, where)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:  # whatever the file does
        raise ValueError(f"{where}: cannot be imported: {type(error).__name__}: {error}".splitlines()[0]) from error


def own_settings(rule: type[ClipRule]) -> dict[str, Any]:
    """Return the settings of a rule's class with their defaults: the parameters of its constructor.

    Raises:
        ValueError: if a parameter has no default of type bool, int, float or str.
    """
    settings = {}
    for name, parameter in inspect.signature(rule).parameters.items():
        if type(parameter.default) not in _TYPES:
            raise ValueError(
                f"{rule.__name__}: its setting {name} has no default; allowed: defaults of the types "
                f"{', '.join(kind.__name__ for kind in _TYPES)}"
            )
        settings[name] = parameter.default
    return settings


def make_own_rule(name: str, settings: dict[str, Any]) -> ClipRule:
    """Return the rule with these settings, after two updates of a few tokens that show whether it works.

    Raises:
        ValueError: in one line: for a setting that the class refuses, for a wrong shape or value, and for a state that
            a checkpoint cannot have.
    """
    kind = load_own_rule(name)
    try:
        rule = kind(**settings)
        for seed in range(2):
            _try(rule, _tokens(seed))
        if rule.follows_updates:
            _try_state(rule, kind(**settings))
    except Exception as error:  # whatever the rule does
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{name}: {text}".splitlines()[0]) from error
    return kind(**settings)


def _tokens(seed: int) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    log_probs, behavior = -torch.rand(2, 4, 6, generator=generator)
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])[:, None].expand(4, 6)
    mask = torch.arange(6).expand(4, 6) < torch.tensor([[6], [6], [3], [1]])
    return Tokens(log_probs, behavior, advantages, mask.float())


def _try_state(rule: ClipRule, resumed: ClipRule) -> None:
    """Let another rule go on from a rule's state, as from a checkpoint, which also has the settings."""
    if lost := [name for name in own_settings(type(rule)) if name != "half_life" and not hasattr(rule, name)]:
        raise ValueError(f"follows_updates is set, and its setting {lost[0]} is no attribute of the same name")
    for name in own_settings(type(rule)).keys() - {"half_life"}:  # a checkpoint is refused where they differ
        if getattr(rule, name) != (kept := getattr(resumed, name)):
            raise ValueError(f"an update changed its setting {name} from {kept}; allowed: in another attribute")
    state = rule.state_dict()
    if wrong := [name for name, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise ValueError(f"state_dict() has {wrong[0]} of the type {type(state[wrong[0]]).__name__}; allowed: Tensor")
    resumed.load_state_dict(state)
    tokens = _tokens(2)
    first, second = ([each.gradient_weights(tokens), *each.bounds(tokens)] for each in (rule, resumed))
    if not all(map(torch.equal, first, second)):
        raise ValueError("follows_updates is set, and a rule with its state_dict() has other bounds or weights")


def _check_metrics(update: UpdateBounds) -> None:
    for name, value in update.others.items():
        if not isinstance(value, torch.Tensor) or value.dim():
            raise ValueError(f"its metric {name} is {value!r}; allowed: a 0-dim Tensor")


def _try(rule: ClipRule, tokens: Tokens) -> None:
    shape = tokens.ratio.shape

    def use() -> None:
        weights = rule.weights(tokens)
        if rule.has_weights != (weights is not None):
            has = "has_weights is set" if rule.has_weights else "has_weights is not set"
            raise ValueError(f"{has}, and weights() returned {type(weights).__name__}")
        if weights is not None:
            if weights.shape != shape:
                raise ValueError(f"weights() has the shape {tuple(weights.shape)}; allowed: that of the tokens, (4, 6)")
            if not bool(((weights >= 0) & weights.isfinite()).all()):
                raise ValueError("weights() has values that are negative or not finite")
            return
        lower, upper = rule.bounds(tokens)
        for bound in (lower, upper):
            if bound.shape not in ((), shape):
                wrong = tuple(bound.shape)
                raise ValueError(f"a bound has the shape {wrong}; allowed: (), or that of the tokens, (4, 6)")
        if not bool((lower <= upper).all()):
            raise ValueError("bounds() has a lower bound above the upper one")
        if lower.dim() + upper.dim() > 0 and isinstance(rule, FixedBounds | SearchedBounds | SteadyBounds):
            raise ValueError("bounds() has a bound per token; allowed with the base TokenBounds")

    if not rule.needs_tally_first:
        use()
    rule.tally(tokens)
    _check_metrics(rule.close_update())
    if rule.needs_tally_first:
        use()
