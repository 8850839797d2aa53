"""Metrics of the updates' clip bounds, under the same names in every framework's logs (docs/metrics.md)."""

from dataclasses import fields

import torch

from openrlhf_bapo.core.clip_bounds import ClipBounds

_NAMES = {"lower": "clip_low", "upper": "clip_high", "reached": "target_reached"}


def bounds_metrics(used: list[ClipBounds], found: list[ClipBounds] | None = None) -> dict[str, float]:
    """Means over updates, with names under "bapo/". Synchronizes with the device once.

    Args:
        used: the bounds that each update was trained with, at least one.
        found: the bounds that the search found on each update, if the used ones only follow them; None if both are the
            same.
    """
    names = [field.name for field in fields(ClipBounds)]
    rows = {_NAMES.get(name, name): [getattr(bounds, name).double() for bounds in used] for name in names}
    if found is not None:
        pairs = list(zip(found, used, strict=True))
        rows |= {
            "initial_share": [f.initial_share for f in found],
            "found_low": [f.lower for f in found],
            "found_high": [f.upper for f in found],
            "found_share": [f.positive_share for f in found],
            "found_distance": [(f.lower - u.lower).abs() + (f.upper - u.upper).abs() for f, u in pairs],
        }
    # nanmean, because the share of an update without active tokens is NaN.
    means = torch.stack([torch.stack(row) for row in rows.values()]).nanmean(1)
    return {f"bapo/{name}": mean for name, mean in zip(rows, means.tolist(), strict=True)}
