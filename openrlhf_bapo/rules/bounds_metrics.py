"""Metrics of the updates' clip bounds, under the same names in every framework's logs (docs/metrics.md)."""

import math
from dataclasses import fields

import torch

from openrlhf_bapo.rules.clip_bounds import ClipBounds
from openrlhf_bapo.rules.clip_rules import UpdateBounds

_NAMES = {"lower": "clip_low", "upper": "clip_high", "reached": "target_reached"}
_OF_A_SEARCH = ("initial_share", "reached")


def bounds_metrics(updates: list[UpdateBounds]) -> dict[str, float]:
    """Return means over updates, under "bapo/". Synchronizes with the device once.

    Args:
        updates: at least one, all of one rule.
    """
    used, found = [update.used for update in updates], [update.found for update in updates if update.found is not None]
    names = [field.name for field in fields(ClipBounds) if found or field.name not in _OF_A_SEARCH]
    rows = {_NAMES.get(name, name): [getattr(bounds, name).double() for bounds in used] for name in names}
    if found and found[0] is not used[0]:  # the bounds in use only follow the search
        pairs = list(zip(found, used, strict=True))
        rows |= {
            "initial_share": [f.initial_share for f in found],
            "found_low": [f.lower for f in found],
            "found_high": [f.upper for f in found],
            "found_share": [f.positive_share for f in found],
            "found_distance": [(f.lower - u.lower).abs() + (f.upper - u.upper).abs() for f, u in pairs],
        }
    rows |= {name: [update.others[name].double() for update in updates] for name in updates[0].others}
    values = torch.stack([torch.stack(row) for row in rows.values()])
    # Shares are NaN for an update without active tokens, and bounds are NaN for a rule without bounds.
    means = values.where(values.isfinite(), torch.nan).nanmean(1).tolist()
    return {
        f"bapo/{name}": mean
        for name, mean in zip(rows, means, strict=True)
        if math.isfinite(mean) or name not in ("clip_low", "clip_high")
    }
