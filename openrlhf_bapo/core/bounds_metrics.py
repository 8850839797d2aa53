"""The clip bounds of updates as metrics, by the names that they have in every framework's logs (docs/metrics.md)."""

from dataclasses import fields

import torch

from openrlhf_bapo.core.clip_bounds import ClipBounds

_NAMES = {"lower": "clip_low", "upper": "clip_high", "reached": "target_reached"}


def bounds_metrics(used: list[ClipBounds], found: list[ClipBounds] | None = None) -> dict[str, float]:
    """Means over updates, under "bapo/". Synchronises once.

    Args:
        used: what each update was trained with, at least one.
        found: what the search found on each, where the bounds in use only follow that; None: they are the same.
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
    # nanmean: an update without any token to balance has no share.
    means = torch.stack([torch.stack(row) for row in rows.values()]).nanmean(1)
    return {f"bapo/{name}": mean for name, mean in zip(rows, means.tolist(), strict=True)}
