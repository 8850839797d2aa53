"""BAPO for OpenRLHF: clip bounds found anew for every policy update (arXiv 2510.18927).

Importing this package loads torch and the search; names from the adapter load OpenRLHF when they are first used.
"""

from openrlhf_bapo.core.clip_bounds import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    find_clip_bounds,
    solve_clip_bounds,
    tally_contributions,
)

__version__ = "0.1.0"

__all__ = [
    "BapoPolicyLoss",
    "ClipBounds",
    "ClipConfig",
    "ContributionTally",
    "find_clip_bounds",
    "register",
    "solve_clip_bounds",
    "tally_contributions",
]


def __getattr__(name: str):
    if name == "BapoPolicyLoss":
        from openrlhf_bapo.adapter.policy_loss import BapoPolicyLoss

        return BapoPolicyLoss
    if name == "register":
        from openrlhf_bapo.adapter.registration import register

        return register
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
