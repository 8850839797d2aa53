"""Clip bounds that are steady across updates: each update uses what the updates before it called for (ours).

The search of `clip_bounds` starts anew in every update, from that update's tokens alone, and its bounds jump with them.
Here they follow slowly. In goes the tally of the update that has just been trained, from the ratios that training's own
forward computed; out come the bounds of the next update, so that no update needs a forward of its own:

    update k:  train between (lower, upper) -> tally of its tokens -> search -> (lower, upper) of update k + 1

With "bounds" the found bounds are averaged, each update's weight halving every `half_life` updates; with "tally" the
tallies are, and the search runs on their average. Positive shares that scatter around the target make the first settle
inside the ranges; pooled, they may never reach the target, and the second then stays in the far corner.
"""

import math
from dataclasses import dataclass

import torch

from openrlhf_bapo.core.clip_bounds import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    measure_clip_bounds,
    solve_clip_bounds,
    tally_at_bounds,
    tally_contributions,
)

AVERAGES = ("bounds", "tally")


@dataclass(frozen=True)
class SmoothingConfig:
    """How slowly the bounds follow."""

    half_life: float
    """Updates after which half of a change has been followed; after 3.3 half-lives nine tenths have. Above 0."""

    of: str = "bounds"
    """What is averaged over updates: the "bounds" that the search finds, or the "tally" that it runs on."""

    start: tuple[float, float] | None = None
    """(lower, upper) of the first update, inside the search's ranges; None: the middle of each."""

    def __post_init__(self):
        """Raises ValueError that names the field, its value and what is allowed."""
        if not 0 < self.half_life < math.inf:
            raise ValueError(f"half_life {self.half_life} is not allowed; it must be above 0 and finite")
        if self.of not in AVERAGES:
            raise ValueError(f"of {self.of!r} is not allowed; it must be one of {AVERAGES}")


class SteadyBounds:
    """The bounds of the next update, `lower` and `upper` (0-dim float64 tensors), kept across updates.

    On all ranks the same, if each is given the tally of all ranks. Never outside the ranges of the search.

    Args:
        config: the search, and with it the ranges.
        smoothing: how slowly the bounds follow.

    Raises:
        ValueError: for a start outside the ranges.
    """

    def __init__(self, config: ClipConfig, smoothing: SmoothingConfig) -> None:
        ranges = [(grid[0], grid[-1]) for grid in (config.lower_grid(), config.upper_grid())]
        start = smoothing.start or [(low + high) / 2 for low, high in ranges]
        for value, (low, high), side in zip(start, ranges, ("lower", "upper"), strict=True):
            if not low <= value <= high:
                raise ValueError(
                    f"start {smoothing.start} is not allowed; its {side} bound must lie in [{low:g}, {high:g}]"
                )
        self.config = config
        self.smoothing = smoothing
        self.lower, self.upper = torch.tensor(start, dtype=torch.float64).unbind()
        self._tally: ContributionTally | None = None
        self._keep = 0.5 ** (1 / smoothing.half_life)

    def tally(self, ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> ContributionTally:
        """What `end_update` needs of tokens that are trained between the bounds; shapes as in `tally_contributions`.

        Its columns are the search's, then those at the bounds, so that one collective reduces both.
        """
        self.to(ratio.device)
        tokens = ratio, advantages, mask
        parts = tally_contributions(*tokens, self.config), tally_at_bounds(*tokens, self.lower, self.upper)
        return ContributionTally(torch.cat([part.sums for part in parts], dim=1))

    def end_update(self, tally: ContributionTally) -> tuple[ClipBounds, ClipBounds]:
        """`update` from the sum of the update's tallies, of all ranks: what it was trained with, and what is found."""
        num_at_bounds = 4  # two buckets a side
        searched, at_bounds = map(ContributionTally, tally.sums.tensor_split([-num_at_bounds], dim=1))
        used = measure_clip_bounds(at_bounds, self.lower, self.upper, self.config)
        return used, self.update(searched)

    @torch.no_grad()
    def update(self, tally: ContributionTally) -> ClipBounds:
        """Follow the update that has just been trained; returns what the search finds on that update alone.

        An update without anything to balance (no token with an advantage) changes nothing.

        Args:
            tally: of all tokens of the update, on all ranks.
        """
        found = wanted = solve_clip_bounds(tally, self.config)
        self.to(tally.sums.device)
        weight = (1 - self._keep) * found.initial_share.isfinite().double()
        if self.smoothing.of == "tally":
            before = tally.sums.new_zeros(()) if self._tally is None else self._tally.sums
            # Of weights that sum to less than 1 at first: shares do not change with the scale.
            self._tally = ContributionTally(before + weight * (tally.sums - before))
            wanted = solve_clip_bounds(self._tally, self.config)
            weight = wanted.initial_share.isfinite().double()
        # lerp ends exactly where it is told to; a sum may be carried past the end of a range by rounding.
        self.lower, self.upper = self.lower.lerp(wanted.lower, weight), self.upper.lerp(wanted.upper, weight)
        return found

    def to(self, device: torch.device) -> None:
        """Keep the bounds there, where the tallies are."""
        self.load_state_dict({name: value.to(device) for name, value in self.state_dict().items()})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a resumed run needs to go on with the same bounds."""
        state = {"lower": self.lower, "upper": self.upper}
        return state if self._tally is None else state | {"tally": self._tally.sums}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a `state_dict`, of the same config."""
        self.lower, self.upper = state["lower"], state["upper"]
        self._tally = ContributionTally(state["tally"]) if "tally" in state else None
