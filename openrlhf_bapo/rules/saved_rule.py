"""The state of a clip rule in another framework's checkpoint, so that a resumed run goes on with its bounds."""

import inspect
import os
import sys
from dataclasses import replace

from openrlhf_bapo.offpolicy.saved_pool import has_saved_state, read_directory, write_directory
from openrlhf_bapo.rules.clip_rules import ClipRule

_FORMAT_VERSION = 1


def save_rule(rule: ClipRule, directory: str | os.PathLike) -> None:
    """Write the rule's state to a directory, if the rule follows earlier updates.

    Raises:
        OSError: if writing fails.
    """
    if rule.follows_updates:
        columns = {name: value.cpu().contiguous() for name, value in rule.state_dict().items()}
        write_directory(directory, columns, {"format_version": _FORMAT_VERSION, "fingerprint": _settings(rule)})


def load_rule(rule: ClipRule, directory: str | os.PathLike) -> None:
    """Let a rule that follows earlier updates go on from a state that `save_rule` wrote.

    If the checkpoint has no such state, the rule starts again, and a line on stderr says so.

    Raises:
        SavedStateError: if the state is damaged, or if a setting other than the half-life and the start differs.
    """
    if not rule.follows_updates:
        return
    if not has_saved_state(directory):
        print(
            f"openrlhf-bapo: {directory} is missing; the rule starts with its initial bounds or weights",
            file=sys.stderr,
        )
        return
    rule.load_state_dict(read_directory(directory, _FORMAT_VERSION, _settings(rule), "remove the folder")[0])


def _settings(rule: ClipRule) -> dict[str, str]:
    """Return the rule's name and its settings, except for the half-life and the start."""
    own = inspect.signature(type(rule)).parameters.keys() - {"config", "smoothing", "half_life"}
    smoothing = rule.config.smoothing
    found = {"rule": type(rule).__name__, "config": str(replace(rule.config, smoothing=None))}
    found |= {"smoothing of": smoothing.of} if smoothing else {}
    return found | {name: str(getattr(rule, name)) for name in sorted(own)}
