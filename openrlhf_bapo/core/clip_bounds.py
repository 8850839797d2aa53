"""The clip bounds of one policy update, searched so that positive tokens carry a target share (BAPO, Algorithm 1).

Take all tokens of one update. Token t has weight m, advantage A and importance ratio r. Two sums depend on one clip
bound each:

    contribution   P(upper), over A > 0              N(lower), over A < 0
    "surrogate"    sum m A min(r, upper)             sum m |A| max(r, lower)          (the paper's Eq. 8)
    "gradient"     sum m A r  where r <= upper       sum m |A| r  where r >= lower

The positive share is P / (P + N). The search walks a fixed path of (lower, upper) points and stops at the first that
reaches the target; if none does, the last point is used and the update is reported as not reached.

Both sums at every point of the path follow from one pass: put every token into the bucket between two grid points that
its ratio falls into, and add up m |A| r and m |A| per bucket and side. That tally is a small tensor, so it adds over
micro-batches and is all-reduced once over data-parallel ranks; the result does not depend on how the update was split.
"""

import functools
import math
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

CONTRIBUTIONS = ("surrogate", "gradient")
ORDERS = ("upper_first", "lower_first")
TARGET_KINDS = ("share", "ratio")
MAX_GRID_STEPS = 1000

# Tokens are added up in this many independent lanes and the lanes are summed afterwards. Nearly all ratios fall into
# one bucket per side, and atomic additions to one address would otherwise queue up on a GPU.
_LANES = 256


@dataclass(frozen=True)
class ClipConfig:
    """What the search is asked for. Bounds are importance ratios (1 = on-policy), not distances from 1."""

    positive_contribution_target: float = 0.5
    """rho_0: the least positive share P / (P + N), in (0, 1); with `target_kind` "ratio" the least P / N, above 0."""

    ratio_lower_start: float = 0.6
    """a-: the lower clip bound before any raise, in (0, 1]."""

    ratio_lower_max: float = 0.9
    """b-: the highest lower clip bound, at most 1."""

    ratio_lower_step: float = 0.02
    """delta_2: one raise of the lower clip bound."""

    ratio_upper_start: float = 1.2
    """a+: the upper clip bound before any raise, at least 1."""

    ratio_upper_max: float = 3.0
    """b+: the highest upper clip bound."""

    ratio_upper_step: float = 0.05
    """delta_1: one raise of the upper clip bound."""

    contribution: str = "surrogate"
    """What a token contributes: "surrogate" (Eq. 8) or "gradient" (what its gradient carries)."""

    order: str = "upper_first"
    """Which bound is raised to its maximum before the other is touched."""

    target_kind: str = "share"
    """"share" compares P / (P + N) with the target; "ratio" compares P / (N + 1e-8)."""

    @classmethod
    def preset(cls, name: str) -> "ClipConfig":
        """The settings of a published recipe ("readme", "paper", "octothinker", "released"), or ours ("steady").

        Raises:
            ValueError: for another name.
        """
        if name not in PRESETS:
            raise ValueError(f"preset {name!r} is unknown; allowed: {', '.join(PRESETS)}")
        return PRESETS[name]

    def __post_init__(self):
        """Raises ValueError that names the field, its value and what is allowed."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float and not math.isfinite(value):
                raise ValueError(f"{field.name} {value} is not allowed; it must be finite")
        target = self.positive_contribution_target
        if self.target_kind == "share" and not 0 < target < 1:
            raise ValueError(f"positive_contribution_target {target} is not allowed; it must lie in (0, 1)")
        if target <= 0:
            raise ValueError(f"positive_contribution_target {target} is not allowed; it must be above 0")
        for name, allowed in (("contribution", CONTRIBUTIONS), ("order", ORDERS), ("target_kind", TARGET_KINDS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is not allowed; it must be one of {allowed}")
        for name, low, high in (
            ("ratio_lower_start", 0, self.ratio_lower_max),
            ("ratio_lower_max", self.ratio_lower_start, 1),
            ("ratio_upper_start", 1, self.ratio_upper_max),
            ("ratio_upper_max", self.ratio_upper_start, math.inf),
        ):
            value = getattr(self, name)
            if not low <= value <= high or value == 0:
                raise ValueError(
                    f"{name} {value} is not allowed; the bounds must satisfy 0 < ratio_lower_start <= ratio_lower_max "
                    "<= 1 <= ratio_upper_start <= ratio_upper_max"
                )
        for side, width in (
            ("lower", self.ratio_lower_max - self.ratio_lower_start),
            ("upper", self.ratio_upper_max - self.ratio_upper_start),
        ):
            step = getattr(self, f"ratio_{side}_step")
            least = width / MAX_GRID_STEPS
            if step <= 0 or step < least:
                raise ValueError(f"ratio_{side}_step {step} is not allowed; it must be above 0 and at least {least:g}")

    def lower_grid(self) -> list[float]:
        """Every lower clip bound that the search may choose, ascending."""
        return _grid(self.ratio_lower_start, self.ratio_lower_max, self.ratio_lower_step)

    def upper_grid(self) -> list[float]:
        """Every upper clip bound that the search may choose, ascending."""
        return _grid(self.ratio_upper_start, self.ratio_upper_max, self.ratio_upper_step)

    def path(self) -> list[tuple[int, int]]:
        """Algorithm 1's walk: (index into `lower_grid`, index into `upper_grid`) of every point, in order."""
        num_lower, num_upper = len(self.lower_grid()), len(self.upper_grid())
        if self.order == "upper_first":
            return [(0, u) for u in range(num_upper)] + [(k, num_upper - 1) for k in range(1, num_lower)]
        return [(k, 0) for k in range(num_lower)] + [(num_lower - 1, u) for u in range(1, num_upper)]


PRESETS = {
    "readme": ClipConfig(),
    "paper": ClipConfig(positive_contribution_target=0.4),
    "octothinker": ClipConfig(
        positive_contribution_target=0.45, ratio_lower_start=0.8, ratio_lower_max=0.9, ratio_upper_max=2.0
    ),
    "released": ClipConfig(
        positive_contribution_target=1.0,
        ratio_lower_max=0.8,
        ratio_lower_step=0.05,
        ratio_upper_max=2.0,
        order="lower_first",
        target_kind="ratio",
    ),
    "steady": ClipConfig(contribution="gradient"),
}


def _grid(start: float, stop: float, step: float) -> list[float]:
    # From the integer k, so that no rounding piles up; 1e-6 of a step forgives (0.9 - 0.6) / 0.02 = 14.999999999999998,
    # and rounding must not carry the last point past the stop.
    return [min(start + k * step, stop) for k in range(math.floor((stop - start) / step + 1e-6) + 1)]


@dataclass(frozen=True)
class _Grids:
    """A config's grids and path as tensors on one device."""

    lower: torch.Tensor  # [num_lower], float64
    upper: torch.Tensor  # [num_upper], float64
    path_lower: torch.Tensor  # [num_points], index into lower
    path_upper: torch.Tensor  # [num_points], index into upper


@functools.lru_cache(maxsize=64)
def _grids(config: ClipConfig, device: torch.device) -> _Grids:
    # Cached: building them copies from the host, which would stall a GPU in every update.
    path_lower, path_upper = zip(*config.path(), strict=True)
    return _Grids(
        lower=torch.tensor(config.lower_grid(), dtype=torch.float64, device=device),
        upper=torch.tensor(config.upper_grid(), dtype=torch.float64, device=device),
        path_lower=torch.tensor(path_lower, device=device),
        path_upper=torch.tensor(path_upper, device=device),
    )


def _one_point(lower: torch.Tensor, upper: torch.Tensor) -> _Grids:
    only = torch.zeros(1, dtype=torch.long, device=lower.device)
    return _Grids(lower=lower[None], upper=upper[None], path_lower=only, path_upper=only)


@dataclass(frozen=True)
class ContributionTally:
    """What the search needs to know of a set of tokens; tallies of disjoint sets add.

    `sums` is float64 [3, num_upper + 1 + num_lower + 1]. Rows: sum of m |A| r, sum of m |A|, number of tokens. Columns:
    positive tokens by the first upper grid point that is not below their ratio, then negative tokens by the number of
    lower grid points that are not above theirs.
    """

    sums: torch.Tensor

    def __add__(self, other: "ContributionTally") -> "ContributionTally":
        return ContributionTally(self.sums + other.sums)

    def all_reduce(self, group: dist.ProcessGroup) -> "ContributionTally":
        """The tally of all tokens on all ranks of `group`, the same on every rank. One collective."""
        sums = self.sums.clone()
        dist.all_reduce(sums, group=group)
        return ContributionTally(sums)


@dataclass(frozen=True)
class ClipBounds:
    """The result of one search; every field is a 0-dim tensor on the tally's device (float64, `reached` bool)."""

    lower: torch.Tensor
    upper: torch.Tensor
    positive_share: torch.Tensor
    """P / (P + N) at the chosen bounds; NaN where there is nothing to share."""

    initial_share: torch.Tensor
    """P / (P + N) at the start of the path."""

    reached: torch.Tensor
    """Whether the target was reached (True where there is nothing to balance)."""

    surrogate_share: torch.Tensor
    """The share at the chosen bounds as "surrogate" defines it, whatever the search went by."""

    gradient_share: torch.Tensor
    """The share at the chosen bounds as "gradient" defines it, whatever the search went by."""

    positive_token_frac: torch.Tensor
    """Tokens with A > 0 as a fraction of those with A != 0, each counted once; NaN if none."""

    clip_frac_positive: torch.Tensor
    """Fraction of the tokens with A > 0 whose ratio lies above `upper`, so that they get no gradient; 0 if none."""

    clip_frac_negative: torch.Tensor
    """Fraction of the tokens with A < 0 whose ratio lies below `lower`, so that they get no gradient; 0 if none."""


@torch.no_grad()
def tally_contributions(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, config: ClipConfig
) -> ContributionTally:
    """Add up a set of tokens in one pass, on their device, without host synchronisation.

    Args:
        ratio: importance ratios pi_theta / pi_behaviour, any shape; what stands under a mask of 0 may be anything.
        advantages: the same shape.
        mask: the same shape; a token's weight in the loss (bool, or a number that is not negative), 0 for "no token".
        config: says which grid the tokens are sorted into.
    """
    return _tally(ratio, advantages, mask, _grids(config, ratio.device))


@torch.no_grad()
def tally_at_bounds(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> ContributionTally:
    """As `tally_contributions`, at one pair of bounds (0-dim, float64) instead of a grid; for `measure_clip_bounds`."""
    return _tally(ratio, advantages, mask, _one_point(lower, upper))


def _tally(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, grids: _Grids) -> ContributionTally:
    num_positive = grids.upper.numel() + 1
    num_buckets = num_positive + grids.lower.numel() + 1

    active = (mask > 0) & (advantages != 0)
    # Edges in the ratio's own precision, as the loss clamps it: a token on a bound is inside for both.
    bucket = torch.where(
        advantages > 0,
        torch.bucketize(ratio, grids.upper.to(ratio.dtype)),
        torch.bucketize(ratio, grids.lower.to(ratio.dtype), right=True) + num_positive,
    )
    size = torch.where(active, mask.double() * advantages.abs().double(), 0.0)
    weighted = torch.where(active, size * ratio.double(), 0.0)
    values = torch.stack([weighted, size, active.double()]).flatten(1)  # [3, num_tokens]

    # Tokens that do not count add zeros to whatever bucket their garbage fell into.
    lane = torch.arange(values.shape[1], device=ratio.device) % _LANES
    index = lane * num_buckets + bucket.flatten()
    sums = values.new_zeros(3, _LANES * num_buckets).index_add_(1, index, values)
    return ContributionTally(sums.view(3, _LANES, num_buckets).sum(1))


def _cumsum_from_right(x: torch.Tensor) -> torch.Tensor:
    return x.flip(1).cumsum(1).flip(1)


@torch.no_grad()
def solve_clip_bounds(tally: ContributionTally, config: ClipConfig) -> ClipBounds:
    """Walk Algorithm 1's path over a tally of the whole update; on its device, without host synchronisation."""
    return _solve(tally, _grids(config, tally.sums.device), config)


@torch.no_grad()
def measure_clip_bounds(
    tally: ContributionTally, lower: torch.Tensor, upper: torch.Tensor, config: ClipConfig
) -> ClipBounds:
    """Shares and clip fractions at bounds that another rule chose, from `tally_at_bounds` with the same bounds.

    `initial_share` is the share at them too: there is no path.
    """
    return _solve(tally, _one_point(lower, upper), config)


def _solve(tally: ContributionTally, grids: _Grids, config: ClipConfig) -> ClipBounds:
    positive, negative = tally.sums.split([grids.upper.numel() + 1, grids.lower.numel() + 1], dim=1)

    # Positive tokens with r <= upper[k] stand in columns 0..k; negative ones with r >= lower[k] in columns k+1 and on.
    inside_positive, outside_positive = positive.cumsum(1)[:, :-1], _cumsum_from_right(positive)[:, 1:]
    inside_negative, outside_negative = _cumsum_from_right(negative)[:, 1:], negative.cumsum(1)[:, :-1]

    sums = {
        "gradient": (inside_positive[0], inside_negative[0]),
        "surrogate": (
            inside_positive[0] + grids.upper * outside_positive[1],
            inside_negative[0] + grids.lower * outside_negative[1],
        ),
    }
    along_path = {name: (p[grids.path_upper], n[grids.path_lower]) for name, (p, n) in sums.items()}
    shares = {name: p / (p + n) for name, (p, n) in along_path.items()}
    (p, n), share = along_path[config.contribution], shares[config.contribution]
    met = (share if config.target_kind == "share" else p / (n + 1e-8)) >= config.positive_contribution_target
    met[:1] |= (p + n)[:1] == 0  # nothing to balance: stay at the start
    reached = met.any(0, keepdim=True)
    # argmax finds the first True. Indexing by tensor keeps the choice on the device.
    point = torch.where(reached, met.int().argmax(0, keepdim=True), met.numel() - 1)
    at_lower, at_upper = grids.path_lower[point], grids.path_upper[point]

    num_positive, num_negative = positive[2].sum(), negative[2].sum()

    return ClipBounds(
        lower=grids.lower[at_lower].squeeze(0),
        upper=grids.upper[at_upper].squeeze(0),
        positive_share=share[point].squeeze(0),
        initial_share=share[0],
        reached=reached.squeeze(0),
        surrogate_share=shares["surrogate"][point].squeeze(0),
        gradient_share=shares["gradient"][point].squeeze(0),
        positive_token_frac=num_positive / (num_positive + num_negative),
        clip_frac_positive=(outside_positive[2, at_upper] / num_positive.clamp(min=1)).squeeze(0),
        clip_frac_negative=(outside_negative[2, at_lower] / num_negative.clamp(min=1)).squeeze(0),
    )


def find_clip_bounds(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    config: ClipConfig,
    group: dist.ProcessGroup | None = None,
) -> ClipBounds:
    """The bounds for these tokens, and for those of every other rank of `group` (None: this process alone).

    Shapes as in `tally_contributions`; every rank of `group` must call, if with an empty set of tokens.
    """
    tally = tally_contributions(ratio, advantages, mask, config)
    return solve_clip_bounds(tally if group is None else tally.all_reduce(group), config)
