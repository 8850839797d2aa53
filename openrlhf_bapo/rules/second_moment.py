"""The bounds that keep the second moment of the log-ratio within a budget (M2PO, arXiv 2510.01161).

A token is harmful if its ratio lies where PPO's clip would cut it: A > 0 and r > 1, or A < 0 and r < 1. The bounds are
[e^-t, e^t], where t solves

    mean over harmful tokens of min(|log r|, t)^2 = budget

If the mean is below the budget for every t, nothing is clipped.

The tally is that of `tally_contributions` with a fine grid of e^-t and e^t, and a fourth row. t differs from the exact
one by less than the distance of two grid points: 0.001 up to t = 1, and a thousandth of t above.
"""

import functools
import math
from dataclasses import replace

import torch

from openrlhf_bapo.rules.clip_bounds import ClipBounds, ContributionTally, Path, solve_on_path, tally_by_grid
from openrlhf_bapo.rules.clip_config import ClipConfig

MAX_LOG_RATIO = 20.0  # of `importance_ratio`


@functools.lru_cache(maxsize=8)
def _grid(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return t from 0 to 20, and the grids of lower and upper bounds, all ascending; float64."""
    near = torch.arange(1000, dtype=torch.float64) / 1000
    num_far = math.ceil(math.log(MAX_LOG_RATIO) * 1000)
    far = torch.exp(torch.arange(num_far + 1, dtype=torch.float64) / num_far * math.log(MAX_LOG_RATIO))
    t = torch.cat([near, far])
    return t.to(device), (-t).exp().flip(0).to(device), t.exp().to(device)


def tally_second_moment(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> ContributionTally:
    """Add up a set of tokens in one pass, on their device, without host synchronization.

    Shapes as in `tally_contributions`. `sums` has a fourth row: sum of (log r)^2.
    """
    _, lower, upper = _grid(ratio.device)
    return tally_by_grid(ratio, advantages, mask, lower, upper, extra=ratio.double().log().square())


@torch.no_grad()
def solve_second_moment(tally: ContributionTally, budget: float) -> torch.Tensor:
    """Return t, 0-dim, inf where the mean is below the budget; on the tally's device, without host synchronization.

    Args:
        tally: `tally_second_moment` of all tokens of the update, on all ranks.
        budget: allowed mean of the squared log-ratio.
    """
    t, _, upper = _grid(tally.sums.device)
    positive, negative = tally.sums.tensor_split([upper.numel() + 1], dim=1)
    # Harmful tokens by the grid's interval from t[k] to t[k + 1]; column 0 of each side has the harmless ones.
    num, squares = positive[2:, 1:] + negative[2:].flip(1)[:, 1:]
    num_from = num.flip(0).cumsum(0).flip(0)  # tokens beyond t[k]
    num_after = torch.cat([num_from[1:], num.new_zeros(1)])  # tokens beyond t[k + 1]
    below = squares.cumsum(0) - squares  # sum of squares up to t[k]
    wanted = budget * num.sum()
    at_end = below + squares + torch.cat([t[1:], t[-1:]]).square() * num_after
    met = (at_end >= wanted) & (wanted > 0)
    k = met.byte().argmax()[None]  # the first interval at whose end the budget is used up
    # As if all tokens of that interval lay beyond t.
    found = ((wanted - below[k]) / num_from[k]).clamp(min=0).sqrt()
    return torch.where(met.any(), found, torch.inf).squeeze(0)


def measure_second_moment(tally: ContributionTally, t: torch.Tensor, config: ClipConfig) -> ClipBounds:
    """Return the bounds [e^-t, e^t], and the shares and clip fractions at the next grid point outside."""
    grid, lower, upper = _grid(tally.sums.device)
    last = grid.numel() - 1
    at = torch.bucketize(t, grid).clamp(max=last)[None]
    bounds = solve_on_path(tally, Path(lower, upper, last - at, at), config)
    t = torch.where(t <= MAX_LOG_RATIO, t, torch.nan)  # beyond, there is no bound
    return replace(bounds, lower=(-t).exp(), upper=t.exp())
