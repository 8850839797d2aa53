"""BAPO for OpenRLHF: clip bounds recomputed for each policy update (arXiv 2510.18927).

Each name loads its module at first use. The search needs only torch; loss and registration also need OpenRLHF.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # what `__getattr__` finds
    from openrlhf_bapo.openrlhf.policy_loss import BapoPolicyLoss  # noqa: F401
    from openrlhf_bapo.openrlhf.registration import register  # noqa: F401
    from openrlhf_bapo.rules.clip_bounds import (  # noqa: F401
        ClipBounds,
        ContributionTally,
        find_clip_bounds,
        measure_clip_bounds,
        solve_clip_bounds,
        tally_at_bounds,
        tally_contributions,
    )
    from openrlhf_bapo.rules.clip_config import ClipConfig, SmoothingConfig  # noqa: F401
    from openrlhf_bapo.rules.clip_rules import (  # noqa: F401
        ClipRule,
        FixedBounds,
        SearchedBounds,
        SteadyBounds,
        Tokens,
        UpdateBounds,
        importance_ratio,
        make_clip_rule,
    )
    from openrlhf_bapo.rules.other_rules import TokenBounds, WeightRule  # noqa: F401

_NAMES = {
    "rules.clip_bounds": "ClipBounds ContributionTally find_clip_bounds measure_clip_bounds solve_clip_bounds "
    "tally_at_bounds tally_contributions",
    "rules.clip_config": "ClipConfig SmoothingConfig",
    "rules.clip_rules": "ClipRule FixedBounds SearchedBounds SteadyBounds Tokens UpdateBounds importance_ratio "
    "make_clip_rule",
    "rules.other_rules": "TokenBounds WeightRule",
    "openrlhf.policy_loss": "BapoPolicyLoss",
    "openrlhf.registration": "register",
}
_MODULES = {name: f"openrlhf_bapo.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def register_in_vllm() -> None:
    """Register in a process of vLLM, which calls this entry point (`vllm.general_plugins`) in all of its processes.

    No other hook reaches the engine processes that are not Ray workers. Without OpenRLHF, this function does nothing.
    """
    if importlib.util.find_spec("openrlhf"):
        importlib.import_module("openrlhf_bapo.openrlhf.registration").register()
