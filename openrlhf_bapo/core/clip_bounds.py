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

import numpy as np
import torch
import torch.distributed as dist

CONTRIBUTIONS = ("surrogate", "gradient")
ORDERS = ("upper_first", "lower_first")
TARGET_KINDS = ("share", "ratio")
MAX_GRID_STEPS = 1000

# Tokens are added up in this many independent lanes and the lanes are summed afterwards. Nearly all ratios fall into
# one bucket per side, and atomic additions to one address would otherwise queue up on a GPU.
_LANES = 256

# On a CPU they are added up in blocks that stay in its cache; few tokens are fastest in the fewest operations.
_BLOCK_TOKENS = 32_768
_FEW_TOKENS = 512


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
class _Edges:
    """The bounds to sort tokens by, in the ratio's precision as the loss clamps it: a token on a bound is inside."""

    lower: torch.Tensor  # [num_lower], ascending
    upper: torch.Tensor  # [num_upper], ascending
    num_cells: int = 0  # of a table to find them by; 0: they are so few that each is compared

    @property
    def num_buckets(self) -> int:
        return self.upper.numel() + 1 + self.lower.numel() + 1

    @functools.cached_property
    def innermost(self) -> tuple[float, float]:
        """The bounds between which a ratio is inside at every point."""
        return self.lower[-1].item(), self.upper[0].item()

    @functools.cached_property
    def _cells(self) -> tuple[np.ndarray, float, np.ndarray, int]:
        below = torch.nextafter(self.lower, torch.zeros_like(self.lower))  # a ratio on a lower bound lies above it
        edges = torch.cat([below, self.upper]).double().numpy()
        scale = self.num_cells / edges[-1]
        cell = _cell(edges, scale, self.num_cells)
        first = np.searchsorted(cell, np.arange(self.num_cells + 1))
        return np.append(edges, np.inf), scale, first, np.bincount(cell).max()

    def position(self, ratio: np.ndarray) -> np.ndarray:
        """How many of the lower bounds are not above and of the upper ones below each ratio."""
        # Many times faster than a search, whose every step is a branch that random ratios send either way: a table
        # says how many edges lie in the cells of the line before the ratio's own, the rest is compared.
        if not self.num_cells:
            lower, upper = self.lower.tolist(), self.upper.tolist()
            compared = [*(ratio >= bound for bound in lower), *(ratio > bound for bound in upper)]
            return np.add.reduce(compared, dtype=np.intp)
        edges, scale, first, num_compared = self._cells
        position = first.take(_cell(ratio, scale, self.num_cells))
        for _ in range(num_compared):
            position += ratio > edges.take(position)
        return position


@functools.cache
def _columns(num_lower: int, num_upper: int) -> np.ndarray:
    """A tally's columns among sums by position, with those of the negative tokens inside behind them."""
    last = num_lower + num_upper + 1
    return np.array([*range(num_lower, last), *range(num_lower), last])


def _cell(ratio: np.ndarray, scale: float, num_cells: int) -> np.ndarray:
    cell = ratio * scale
    return np.minimum(cell, num_cells, out=cell).astype(np.intp)


@functools.lru_cache(maxsize=64)
def _edges(config: ClipConfig, device: torch.device, dtype: torch.dtype) -> _Edges:
    # Cached, as _path is: building them copies from the host, which would stall a GPU in every update.
    grids = config.lower_grid(), config.upper_grid()
    lower, upper = (torch.tensor(grid, dtype=torch.float64, device=device).to(dtype) for grid in grids)
    return _Edges(lower, upper, num_cells=4096)


Array = torch.Tensor | np.ndarray


def _array(tensor: torch.Tensor) -> Array:
    """On a CPU numpy's, whose operations on a few numbers take half as long."""
    return tensor.numpy(force=True) if tensor.device.type == "cpu" else tensor


@dataclass(frozen=True)
class _Path:
    """The points of a walk, as arrays of one device."""

    bounds: Array
    """[2, num_points], float64: the upper and the lower bound of each point."""

    members: Array
    """[num_buckets, 2 * 2 * num_points], 1.0 where a bucket's tokens are (inside, outside) a point's (upper, lower)."""

    first: Array
    """[num_points], falling: the first of the points that meet the target has the highest."""

    last: Array
    """[num_points], below `first`: of the points that do not meet it the last has the highest."""


@functools.lru_cache(maxsize=64)
def _path(config: ClipConfig, device: torch.device) -> _Path:
    lower, upper = zip(*config.path(), strict=True)
    grids = config.upper_grid(), config.lower_grid()
    bounds = [[grid[i] for i in at] for grid, at in zip(grids, (upper, lower), strict=True)]
    return _Path(_array(torch.tensor(bounds, dtype=torch.float64, device=device)), *_members(lower, upper, device))


@functools.lru_cache(maxsize=64)
def _members(lower: tuple[int, ...], upper: tuple[int, ...], device: torch.device) -> list[Array]:
    # Positive tokens with r <= upper[k] stand in buckets 0..k; negative ones with r >= lower[k] in buckets k+1 and on.
    positive = torch.arange(max(upper) + 2)[:, None] <= torch.tensor(upper)
    negative = torch.arange(max(lower) + 2)[:, None] > torch.tensor(lower)
    inside, outside = (torch.block_diag(*sides) for sides in ((positive, negative), (~positive, ~negative)))
    first = torch.arange(len(lower), 0, -1)
    last = torch.where(first == 1, 0, -1)
    return [_array(x.to(device)) for x in (torch.cat([inside, outside], 1).double(), first, last)]


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
    return _tally(ratio, advantages, mask, _edges(config, ratio.device, ratio.dtype))


@torch.no_grad()
def tally_at_bounds(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> ContributionTally:
    """As `tally_contributions`, at one pair of bounds (0-dim, float64) instead of a grid; for `measure_clip_bounds`."""
    return _tally(ratio, advantages, mask, _Edges(lower[None].to(ratio.dtype), upper[None].to(ratio.dtype)))


def _tally(ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, edges: _Edges) -> ContributionTally:
    tokens = ratio.flatten(), advantages.flatten(), mask.flatten()
    if ratio.device.type != "cpu":
        return ContributionTally(_sums_of_all(*tokens, edges, _LANES))
    if ratio.numel() <= _FEW_TOKENS:
        return ContributionTally(_sums_of_all(*tokens, edges, 1))
    if ratio.numel() <= _BLOCK_TOKENS:
        return ContributionTally(_sums_of_block(edges, *tokens))
    blocks = zip(*(x.split(_BLOCK_TOKENS) for x in tokens), strict=True)
    return ContributionTally(functools.reduce(torch.add, (_sums_of_block(edges, *block) for block in blocks)))


def _sums_of_all(
    ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, edges: _Edges, num_lanes: int
) -> torch.Tensor:
    """A tally's sums, every token put into its bucket; nothing is read on the host."""
    num_positive, num_buckets = edges.upper.numel() + 1, edges.num_buckets
    active = (mask > 0) & (advantages != 0)
    bucket = torch.where(
        advantages > 0,
        torch.bucketize(ratio, edges.upper),
        torch.bucketize(ratio, edges.lower, right=True) + num_positive,
    )
    size = advantages.double() * mask
    # Tokens that do not count add zeros to whatever bucket their garbage fell into.
    values = torch.where(active, torch.stack([size * ratio, size, torch.ones_like(size)]), 0.0)  # [3, num_tokens]
    if num_lanes > 1:
        bucket += torch.arange(bucket.numel(), device=ratio.device) % num_lanes * num_buckets
    sums = values.new_zeros(3, num_lanes * num_buckets).index_add_(1, bucket, values)
    return sums.view(3, num_lanes, num_buckets).sum(1).abs_()


@np.errstate(invalid="ignore", over="ignore")
def _sums_of_block(edges: _Edges, ratio: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As `_sums_of_all`, faster on a CPU: most tokens are inside at every point, and only the others need a bucket."""
    if mask.dtype == torch.bool:
        weighted = (advantages * mask.view(torch.uint8)).double()  # bytes are converted several times faster
    else:
        weighted = advantages.double() * mask
    r, size = ratio.double().numpy(force=True), weighted.numpy(force=True)
    is_positive, is_negative = size > 0, size < 0
    num_positive, num_negative = np.count_nonzero(is_positive), np.count_nonzero(is_negative)
    num_lower, num_upper, (lower, upper) = edges.lower.numel(), edges.upper.numel(), edges.innermost
    outside = np.flatnonzero(is_positive & (r > upper) | is_negative & (r < lower))
    sums = np.zeros((3, edges.num_buckets))  # by position, the tokens inside stay out; and one more
    if outside.size:
        outside_r, outside_size = r.take(outside), size.take(outside)
        position = edges.position(outside_r)
        for row, values in enumerate((outside_size * outside_r, outside_size, None)):
            sums[row] = np.bincount(position, values, edges.num_buckets)
        num_negative -= (num_negative_outside := np.count_nonzero(outside_size < 0))
        num_positive -= outside.size - num_negative_outside
        size[outside] = 0
    for column, side, num in (
        (num_lower, np.maximum(size, 0), num_positive),
        (-1, np.minimum(size, 0, out=size), num_negative),
    ):
        sums[:, column] = np.einsum("t,t", side, r), side.sum(), num  # a dot product has threads too, as in _solve
    # Garbage under a mask of 0 has become a zero, or else a sum that is not finite.
    if not math.isfinite(sums.sum()):
        return _sums_of_all(ratio, advantages, mask, edges, 1)
    return torch.from_numpy(np.abs(sums.take(_columns(num_lower, num_upper), 1)))


@torch.no_grad()
def solve_clip_bounds(tally: ContributionTally, config: ClipConfig) -> ClipBounds:
    """Walk Algorithm 1's path over a tally of the whole update; on its device, without host synchronisation."""
    return _solve(tally, _path(config, tally.sums.device), config)


@torch.no_grad()
def measure_clip_bounds(
    tally: ContributionTally, lower: torch.Tensor, upper: torch.Tensor, config: ClipConfig
) -> ClipBounds:
    """Shares and clip fractions at bounds that another rule chose, from `tally_at_bounds` with the same bounds.

    `initial_share` is the share at them too: there is no path.
    """
    only_point = _members((0,), (0,), lower.device)
    return _solve(tally, _Path(_array(torch.stack([upper, lower])[:, None]), *only_point), config)


@np.errstate(invalid="ignore")
def _solve(tally: ContributionTally, path: _Path, config: ClipConfig) -> ClipBounds:
    sums = _array(tally.sums)
    np_or_torch = torch if isinstance(sums, torch.Tensor) else np
    # Rows of the tally x (inside, outside) x (positive, negative) x points, in one operation: the tally is small, and
    # what a search of few tokens takes is the number of its operations. Not by `@`, for which numpy has threads of its
    # own, which go on waiting for work on the cores that torch's need.
    weighted, size, num_tokens = np_or_torch.einsum("rb,bp->rp", sums, path.members).reshape(3, 2, 2, -1)
    gradient, num_outside = weighted[0], num_tokens[1]
    surrogate = gradient + path.bounds * size[1]
    contributions = np_or_torch.concatenate([surrogate[None], gradient[None]])  # as CONTRIBUTIONS
    total = contributions.sum(1)
    shares = contributions[:, 0] / total

    chosen = CONTRIBUTIONS.index(config.contribution)
    share = shares[chosen]
    value = share
    if config.target_kind == "ratio":
        value = contributions[chosen, 0] / (contributions[chosen, 1] + 1e-8)
    met = value >= config.positive_contribution_target
    stay = met[:1]
    stay |= total[chosen, :1] == 0  # there is nothing to balance
    point = np_or_torch.where(met, path.first, path.last).argmax(0, keepdims=True)

    num_a_side = num_tokens.sum(0)
    positive_frac = num_a_side[:1] / num_a_side.sum(0, keepdims=True)
    clip_fracs = num_outside / num_a_side.clip(min=1)
    along_path = np_or_torch.concatenate([path.bounds, shares, positive_frac, clip_fracs, met[None]])
    # Indexing by array keeps the choice on the device.
    at_point = np_or_torch.concatenate([along_path[:, point].reshape(-1), share[:1]])
    upper, lower, *at_point, reached, at_start = torch.as_tensor(at_point).unbind()
    return ClipBounds(
        lower=lower,
        upper=upper,
        positive_share=at_point[chosen],
        initial_share=at_start,
        reached=reached.bool(),
        surrogate_share=at_point[0],
        gradient_share=at_point[1],
        positive_token_frac=at_point[2],
        clip_frac_positive=at_point[3],
        clip_frac_negative=at_point[4],
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
