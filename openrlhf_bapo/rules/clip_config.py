"""BAPO's settings: the search for clip bounds, the settings around it, and the presets.

Bounds are importance ratios (1 = on-policy), not distances from 1.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from numbers import Real

CONTRIBUTIONS = ("surrogate", "gradient")
ORDERS = ("upper_first", "lower_first")
TARGET_KINDS = ("share", "ratio")
SCOPES = ("update", "micro_batch")
AVERAGES = ("bounds", "tally")
MAX_GRID_STEPS = 1000


def _is_number(value: object) -> bool:
    """Say whether a value is a number: YAML has texts and truth values too."""
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class SmoothingConfig:
    """How slowly the bounds of an update follow the updates before it (ours)."""

    half_life: float
    """Number of updates in which the bounds make half of a change; nine tenths take 3.3 half-lives. Above 0."""

    of: str = "bounds"
    """The quantity that is averaged over updates: the "bounds" that the search finds, or the "tally" that it uses."""

    start: tuple[float, float] | None = None
    """(lower, upper) of the first update, inside the search's ranges; None: the middle of each range."""

    def __post_init__(self) -> None:
        """Raise ValueError, which names the field, its value and what is allowed."""
        if not _is_number(self.half_life) or not 0 < self.half_life < math.inf:
            raise ValueError(f"half_life {self.half_life!r} is not allowed; it must be a number above 0, and finite")
        if self.of not in AVERAGES:
            raise ValueError(f"of {self.of!r} is not allowed; it must be one of {AVERAGES}")
        if self.start is not None:  # YAML has lists, and a search is looked up by its settings
            start = tuple(self.start) if isinstance(self.start, Iterable) else ()
            if len(start) != 2 or not all(map(_is_number, start)):
                raise ValueError(f"start {self.start!r} is not allowed; it must be two numbers, (lower, upper)")
            object.__setattr__(self, "start", start)


@dataclass(frozen=True)
class ClipConfig:
    """The settings of BAPO's clip rule: its search (section 4.2, Algorithm 1), and what a preset adds to it.

    The default target, ranges and steps are those of the paper's section 5.1, the default order that of section 4.2.
    """

    positive_contribution_target: float = 0.4
    """rho_0, where the search stops: P / (P + N) in (0, 1), or with `target_kind` "ratio" P / N above 0."""

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
    """The contribution of a token: "surrogate" (our reading of Eq. 8) or "gradient" (ours: without clipped tokens)."""

    order: str = "upper_first"
    """Which bound is raised to its maximum before the other is touched."""

    target_kind: str = "share"
    """"share" compares P / (P + N) with the target; "ratio" compares P / (N + 1e-8)."""

    smoothing: SmoothingConfig | None = None
    """None: the bounds are searched for each update (section 4.2). Otherwise they follow earlier updates (ours)."""

    scope: str = "update"
    """The tokens that a search uses: those of an "update" on all ranks, or of a "micro_batch" on all ranks."""

    dual_clip: float | None = None
    """The dual clip of a preset; None: the framework's own. `--actor.dual_clip` of OpenRLHF and Molt wins over it."""

    @classmethod
    def preset(cls, name: str) -> "ClipConfig":
        """Return the settings of a published recipe ("readme", "paper", "octothinker", "released"), or ours ("steady").

        A preset sets the whole rule: the search, smoothing, scope and dual clip.

        Raises:
            ValueError: if no preset has this name.
        """
        if name not in tuple(PRESETS):  # YAML has lists, which no dictionary looks up
            raise ValueError(f"preset {name!r} is unknown; allowed: {', '.join(PRESETS)}")
        return PRESETS[name]

    def __post_init__(self) -> None:
        """Raise ValueError, which names the field, its value and what is allowed."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is float and not (_is_number(value) and math.isfinite(value)):
                raise ValueError(f"{field.name} {value!r} is not allowed; it must be a finite number")
        target = self.positive_contribution_target
        if self.target_kind == "share" and not 0 < target < 1:
            raise ValueError(f"positive_contribution_target {target} is not allowed; it must lie in (0, 1)")
        if target <= 0:
            raise ValueError(f"positive_contribution_target {target} is not allowed; it must be above 0")
        for name, allowed in (
            ("contribution", CONTRIBUTIONS),
            ("order", ORDERS),
            ("target_kind", TARGET_KINDS),
            ("scope", SCOPES),
        ):
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
        for side in ("lower", "upper"):
            start, stop, step = (getattr(self, f"ratio_{side}_{name}") for name in ("start", "max", "step"))
            least = (stop - start) / MAX_GRID_STEPS
            if step <= 0 or step < least:
                raise ValueError(f"ratio_{side}_step {step} is not allowed; it must be above 0 and at least {least:g}")
        if (dual := self.dual_clip) is not None and not (_is_number(dual) and 1 < dual < math.inf):
            raise ValueError(f"dual_clip {dual!r} is not allowed; it must be None, or a number above 1, and finite")
        self._check_smoothing()

    def _check_smoothing(self) -> None:
        if (smoothing := self.smoothing) is None:
            return
        if self.scope != "update":
            raise ValueError(f"scope {self.scope!r} is not allowed with smoothing, which follows whole updates")
        if smoothing.start is None:
            return
        for side, value, grid in zip(
            ("lower", "upper"), smoothing.start, (self.lower_grid(), self.upper_grid()), strict=True
        ):
            if not grid[0] <= value <= grid[-1]:
                raise ValueError(
                    f"smoothing_start {smoothing.start} is not allowed; its {side} bound must lie in "
                    f"[{grid[0]:g}, {grid[-1]:g}]"
                )

    def lower_grid(self) -> list[float]:
        """List the lower clip bounds that the search may choose, ascending."""
        return _grid(self.ratio_lower_start, self.ratio_lower_max, self.ratio_lower_step)

    def upper_grid(self) -> list[float]:
        """List the upper clip bounds that the search may choose, ascending."""
        return _grid(self.ratio_upper_start, self.ratio_upper_max, self.ratio_upper_step)

    def path(self) -> list[tuple[int, int]]:
        """List the points of the search in order: (index into `lower_grid`, index into `upper_grid`).

        The order "upper_first" is that of Algorithm 1 (section 4.2), "lower_first" that of the preset `released`.
        """
        num_lower, num_upper = len(self.lower_grid()), len(self.upper_grid())
        if self.order == "upper_first":
            return [(0, u) for u in range(num_upper)] + [(k, num_upper - 1) for k in range(1, num_lower)]
        return [(k, 0) for k in range(num_lower)] + [(num_lower - 1, u) for u in range(1, num_upper)]


PRESETS = {
    # The README of the authors' release.
    "readme": ClipConfig(positive_contribution_target=0.5),
    "paper": ClipConfig(),
    # The paper's appendix A, which names no steps: those of section 5.1.
    "octothinker": ClipConfig(
        positive_contribution_target=0.45, ratio_lower_start=0.8, ratio_lower_max=0.9, ratio_upper_max=2.0
    ),
    # The authors' recipe for verl.
    "released": ClipConfig(
        positive_contribution_target=1.0,
        ratio_lower_max=0.8,
        ratio_lower_step=0.05,
        ratio_upper_max=2.0,
        order="lower_first",
        target_kind="ratio",
        scope="micro_batch",
        dual_clip=3.0,
    ),
    # Ours.
    "steady": ClipConfig(
        positive_contribution_target=0.5,
        contribution="gradient",
        smoothing=SmoothingConfig(half_life=20.0),
        dual_clip=3.0,
    ),
}

DEFAULT_PRESET = "paper"
"""The preset when none is named; `ClipConfig()` is the same."""

_BESIDE_THE_SEARCH = ("smoothing", "scope", "dual_clip")
SEARCH_FIELDS = tuple(field.name for field in fields(ClipConfig) if field.name not in _BESIDE_THE_SEARCH)
"""The fields of `ClipConfig` that `solve_clip_bounds` uses."""


def _grid(start: float, stop: float, step: float) -> list[float]:
    # Computed from the integer k, so that rounding does not pile up. 1e-6 of a step forgives (0.9 - 0.6) / 0.02 =
    # 14.999999999999998, and rounding must not carry the last point past the stop.
    return [min(start + k * step, stop) for k in range(math.floor((stop - start) / step + 1e-6) + 1)]
