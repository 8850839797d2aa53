"""BAPO for OpenRLHF: clip bounds found anew for every policy update (arXiv 2510.18927).

Every name loads its module when it is first used: the search needs torch only, the loss and the registration OpenRLHF.
"""

import importlib

__version__ = "0.1.0"

_MODULES = {
    "BapoPolicyLoss": "openrlhf_bapo.adapter.policy_loss",
    "ClipBounds": "openrlhf_bapo.core.clip_bounds",
    "ClipConfig": "openrlhf_bapo.core.clip_bounds",
    "ContributionTally": "openrlhf_bapo.core.clip_bounds",
    "SmoothingConfig": "openrlhf_bapo.core.steady_bounds",
    "SteadyBounds": "openrlhf_bapo.core.steady_bounds",
    "find_clip_bounds": "openrlhf_bapo.core.clip_bounds",
    "measure_clip_bounds": "openrlhf_bapo.core.clip_bounds",
    "register": "openrlhf_bapo.adapter.registration",
    "solve_clip_bounds": "openrlhf_bapo.core.clip_bounds",
    "tally_at_bounds": "openrlhf_bapo.core.clip_bounds",
    "tally_contributions": "openrlhf_bapo.core.clip_bounds",
}

__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
