"""The search for the clip bounds of one policy update, so that positive tokens carry a target share (section 4.2).

Take all tokens of one update. Token t has weight m, advantage A and importance ratio r. Two sums depend on one clip
bound each:

    contribution   P(upper), over A > 0              N(lower), over A < 0
    "surrogate"    sum m A min(r, upper)             sum m |A| max(r, lower)          (our reading of Eq. 8)
    "gradient"     sum m A r  where r <= upper       sum m |A| r  where r >= lower    (ours)

The positive share is P / (P + N). The search walks a fixed path of (lower, upper) points and stops at the first one
that reaches the target. If no point reaches it, the last point is used and the update is reported as not reached.

One pass over the tokens gives both sums at every point: sort each token into the bucket between two grid points that
holds its ratio, and add up m |A| r and m |A| per bucket and side. This tally is a small tensor. It adds over
micro-batches and is all-reduced once over data-parallel ranks, so the result does not depend on how the update was
split. Only `find_clip_bounds` waits for a GPU.
"""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from openrlhf_bapo.rules.clip_config import CONTRIBUTIONS, ClipConfig

# Tokens are added up in independent lanes of buckets, and the lanes are summed afterwards. Nearly all ratios fall into
# one bucket per side, and atomic additions to one address would queue up on a GPU.
_LANES = 256
_MOST_BUCKETS = 2**15  # in all lanes


@dataclass(frozen=True)
class ContributionTally:
    """The sums over a set of tokens that the search needs; tallies of disjoint sets add.

    `sums` is float64 [3, num_upper + 1 + num_lower + 1]. Rows: sum of m |A| r, sum of m |A|, number of tokens. Columns:
    positive tokens by the index of the lowest upper grid point >= their ratio, then negative tokens by the number of
    lower grid points <= their ratio.
    """

    sums: torch.Tensor

    def __add__(self, other: "ContributionTally") -> "ContributionTally":
        return ContributionTally(self.sums + other.sums)

    def all_reduce(self, group: dist.ProcessGroup) -> "ContributionTally":
        """Return the tally of all tokens on all ranks of `group`, the same on every rank. One collective."""
        sums = self.sums.clone()
        dist.all_reduce(sums, group=group)
        return ContributionTally(sums)


@dataclass(frozen=True)
class ClipBounds:
    """Bounds, and the shares at them. Every field is a 0-dim tensor on the tally's device (float64, `reached` bool)."""

    lower: torch.Tensor
    upper: torch.Tensor
    positive_share: torch.Tensor
    """P / (P + N) at the bounds; NaN if P + N is 0."""

    initial_share: torch.Tensor
    """P / (P + N) at the start of the path."""

    reached: torch.Tensor
    """Whether the target was reached; True if P + N is 0 at the start of the path."""

    surrogate_share: torch.Tensor
    """The positive share at the bounds by the contribution "surrogate", whichever contribution the search used."""

    gradient_share: torch.Tensor
    """The positive share at the bounds by the contribution "gradient", whichever contribution the search used."""

    positive_token_frac: torch.Tensor
    """Tokens with A > 0 as a fraction of those with A != 0, each counted once; NaN without any."""

    clip_frac_positive: torch.Tensor
    """Fraction of the tokens with A > 0 whose ratio lies above `upper`, so that they get no gradient; 0 without any."""

    clip_frac_negative: torch.Tensor
    """Fraction of the tokens with A < 0 whose ratio lies below `lower`, so that they get no gradient; 0 without any."""


@dataclass(frozen=True)
class Path:
    """The bounds that a search may choose, on one device."""

    lower: torch.Tensor  # [num_lower], ascending, float64
    upper: torch.Tensor  # [num_upper]
    lower_at: torch.Tensor  # [num_points], index into `lower` of each point
    upper_at: torch.Tensor  # [num_points]


@functools.lru_cache(maxsize=64)  # building it would stall a GPU in every update
def _path(config: ClipConfig, device: torch.device) -> Path:
    grids = (torch.tensor(grid, dtype=torch.float64) for grid in (config.lower_grid(), config.upper_grid()))
    return Path(*(x.to(device) for x in (*grids, *torch.tensor(config.path()).unbind(1))))


def tally_contributions(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: ClipConfig
) -> ContributionTally:
    """Add up a set of tokens in one pass, on their device, without host synchronization.

    Args:
        ratio: importance ratios pi_theta / pi_behavior, any shape; values under a mask of 0 may be anything.
        advantages: the same shape.
        mask: the same shape; each token's weight in the loss (bool, or a number of at least 0), 0 for "no token".
        config: gives the grid that the tokens are sorted into.
    """
    path = _path(config, ratio.device)
    return tally_by_grid(ratio, advantages, mask, path.lower, path.upper)


def tally_at_bounds(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> ContributionTally:
    """Add up a set of tokens for `measure_clip_bounds`, by one pair of bounds (0-dim, float64) instead of a grid."""
    return tally_by_grid(ratio, advantages, mask, lower[None], upper[None])


@torch.no_grad()
def tally_by_grid(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    extra: torch.Tensor | None = None,
) -> ContributionTally:
    """Add up a set of tokens by the grids of lower [num_lower] and upper [num_upper] bounds, ascending, float64.

    `extra`, a value per token, is added up in a fourth row, each token counted once.
    """
    ratio, advantages, mask = ratio.flatten(), advantages.flatten(), mask.flatten()
    # The bounds in the ratio's precision, as the loss clamps it: a token on a bound is inside.
    lower, upper = lower.to(ratio.dtype), upper.to(ratio.dtype)
    num_positive = upper.numel() + 1
    num_buckets = num_positive + lower.numel() + 1
    bucket = torch.where(
        advantages > 0,
        torch.bucketize(ratio, upper),
        torch.bucketize(ratio, lower, right=True) + num_positive,
    )
    num_lanes = min(_LANES, max(1, _MOST_BUCKETS // num_buckets))
    bucket += torch.arange(bucket.numel(), device=ratio.device) % num_lanes * num_buckets
    size = advantages.double().abs() * mask
    values = torch.stack([size * ratio, size, torch.ones_like(size)] + ([] if extra is None else [extra.flatten()]))
    # Masked tokens, and tokens with A = 0, add zeros to an arbitrary bucket. A weight below 0 has no meaning.
    values = torch.where((mask > 0) & (advantages != 0), values, 0.0)
    values = torch.where(mask >= 0, values, torch.nan)
    sums = values.new_zeros(len(values), num_lanes * num_buckets).index_add_(1, bucket, values)
    return ContributionTally(sums.view(len(values), num_lanes, num_buckets).sum(1))


def solve_clip_bounds(tally: ContributionTally, config: ClipConfig) -> ClipBounds:
    """Walk Algorithm 1's path (section 4.2) over an update's tally, on its device, without host synchronization."""
    return solve_on_path(tally, _path(config, tally.sums.device), config)


def measure_clip_bounds(
    tally: ContributionTally, lower: torch.Tensor, upper: torch.Tensor, config: ClipConfig
) -> ClipBounds:
    """Return shares and clip fractions at bounds that another rule chose, from `tally_at_bounds` with these bounds.

    There is no path, so `initial_share` is the share at the bounds too.
    """
    at_first = torch.zeros(1, dtype=torch.long, device=lower.device)
    return solve_on_path(tally, Path(lower[None], upper[None], at_first, at_first), config)


@torch.no_grad()
def solve_on_path(tally: ContributionTally, path: Path, config: ClipConfig) -> ClipBounds:
    """Return the first point of the path that meets the target, else the last; the tally is by the path's grids."""
    positive, negative = tally.sums.tensor_split([path.upper.numel() + 1], dim=1)
    # Sums inside and outside each bound, [3, num_points]: positive tokens with r <= upper[k] are in buckets 0 to k,
    # negative tokens with r >= lower[k] in buckets k + 1 and on.
    inside_upper, outside_upper = (x[:, path.upper_at] for x in (_up_to(positive), _after(positive)))
    inside_lower, outside_lower = (x[:, path.lower_at] for x in (_after(negative), _up_to(negative)))
    lower, upper = path.lower[path.lower_at], path.upper[path.upper_at]
    p = torch.stack([inside_upper[0] + upper * outside_upper[1], inside_upper[0]])  # rows as CONTRIBUTIONS
    n = torch.stack([inside_lower[0] + lower * outside_lower[1], inside_lower[0]])
    p = p.where(tally.sums.isfinite().all(), torch.nan)  # a ratio of NaN may lie in a bucket that no share adds up
    shares = p / (p + n)

    by = CONTRIBUTIONS.index(config.contribution)
    value = shares[by] if config.target_kind == "share" else p[by] / (n[by] + 1e-8)
    met = value >= config.positive_contribution_target
    met[0] |= p[by, 0] + n[by, 0] == 0  # there is nothing to balance
    last = met.numel() - 1
    point = torch.where(met.any(), met.byte().argmax(), last)[None]  # argmax: the first that meets the target

    num_positive, num_negative = positive[2].sum(), negative[2].sum()
    clipped = outside_upper[2] / num_positive.clamp(min=1), outside_lower[2] / num_negative.clamp(min=1)
    # Indexing by a tensor keeps the choice on the device.
    lower, upper, surrogate, gradient, clipped_positive, clipped_negative, reached = (
        torch.stack([lower, upper, *shares, *clipped, met])[:, point].squeeze(1).unbind()
    )
    return ClipBounds(
        lower=lower,
        upper=upper,
        positive_share=(surrogate, gradient)[by],
        initial_share=shares[by, 0],
        reached=reached.bool(),
        surrogate_share=surrogate,
        gradient_share=gradient,
        positive_token_frac=num_positive / (num_positive + num_negative),
        clip_frac_positive=clipped_positive,
        clip_frac_negative=clipped_negative,
    )


def _up_to(buckets: torch.Tensor) -> torch.Tensor:
    """Sum the buckets 0 to k, for each bound k."""
    return buckets[:, :-1].cumsum(1)


def _after(buckets: torch.Tensor) -> torch.Tensor:
    """Sum the buckets k + 1 and on, for each bound k."""
    return buckets[:, 1:].flip(1).cumsum(1).flip(1)


def find_clip_bounds(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: ClipConfig,
    group: dist.ProcessGroup | None = None,
) -> ClipBounds:
    """Return the bounds for the tokens of all ranks of `group` (None: of this process alone).

    Shapes as in `tally_contributions`. Every rank of `group` must call, even without tokens.

    Raises:
        ValueError: on every rank, if a token has a ratio or an advantage that is not finite, or a weight that is not 0
            or more.
    """
    tally = tally_contributions(ratio, advantages, mask, config)
    tally = tally if group is None else tally.all_reduce(group)
    if not bool(tally.sums.isfinite().all()):
        raise ValueError(
            "ratio, advantages and mask are not allowed: a token has a ratio or an advantage that is not finite, or a "
            "weight below 0; give tokens that should not count a mask of 0"
        )
    return solve_clip_bounds(tally, config)
