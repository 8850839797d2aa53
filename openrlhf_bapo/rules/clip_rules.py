"""Clip rules choose the clip bounds of each policy update, or the weight of each token in it.

A rule goes through an update in one of two orders:

    SearchedBounds               tally every micro-batch -> close_update -> train between `lower` and `upper`
    FixedBounds, SteadyBounds    train between `lower` and `upper`, tally as you go -> close_update

`needs_tally_first` says which. OpenRLHF, TRL, verl and a plain loop use the same objects. Each of them knows only which
micro-batches make an update, which ranks train on it together, and where the bounds go into its loss. other_rules.py
has the rules of other methods.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from openrlhf_bapo.rules.clip_bounds import (
    ClipBounds,
    ContributionTally,
    measure_clip_bounds,
    solve_clip_bounds,
    tally_at_bounds,
    tally_contributions,
)
from openrlhf_bapo.rules.clip_config import ClipConfig, SmoothingConfig

MOST_RATIO = math.exp(21.0)
"""Above every importance ratio."""


def importance_ratio(log_probs: torch.Tensor, behavior_log_probs: torch.Tensor) -> torch.Tensor:
    """Return pi_theta / pi_behavior per token, from the log-probs of both, with the log-ratio clamped to [-20, 20].

    The clamp is that of OpenRLHF's `PolicyLoss` and of verl's losses. Log-probs of a half precision give a float32
    ratio, because e^20 is beyond fp16.
    """
    log_ratio = log_probs - behavior_log_probs
    return log_ratio.to(torch.promote_types(log_ratio.dtype, torch.float32)).clamp(-20.0, 20.0).exp()


def share_weights(
    mask: torch.Tensor, config: ClipConfig, mean_over: str = "update", num_tokens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each token's weight in the positive share: its weight in the loss.

    The released recipe, which has a P / N target, gives each token weight 1, whatever the loss averages over.

    Args:
        mask: [batch, tokens], 1 for the response's tokens.
        config: says whether the target is a share.
        mean_over: the tokens of the loss's first mean: those of the "update", of each "sequence", or of the
            "micro_batch".
        num_tokens: 0-dim; the number that the loss of a micro-batch is divided by, such as its tokens on all ranks.
            None: the tokens of `mask`.
    """
    if mean_over == "update" or config.target_kind == "ratio":
        return mask
    if num_tokens is None:
        num_tokens = mask.sum(-1, keepdim=True) if mean_over == "sequence" else mask.sum()
    return mask.double() / num_tokens.clamp(min=1)


@dataclass(frozen=True)
class Tokens:
    """The tokens of one micro-batch as a rule sees them; the fields have one shape, such as [batch, tokens]."""

    log_probs: torch.Tensor
    """log pi_theta of each token."""

    behavior_log_probs: torch.Tensor
    """The denominator of the ratio: log pi of the policy that generated the token. Under the decoupled objective, log
    pi of the policy that training on the rollout started from."""

    advantages: torch.Tensor

    weight: torch.Tensor
    """The token's weight in the objective (`share_weights`), 0 for "no token"."""

    @functools.cached_property
    def ratio(self) -> torch.Tensor:
        """The importance ratio of each token, without a gradient."""
        return importance_ratio(self.log_probs.detach(), self.behavior_log_probs)


@dataclass(frozen=True)
class UpdateBounds:
    """One closed update."""

    used: ClipBounds
    """The bounds that the update is or was trained between, and the shares at them."""

    found: ClipBounds | None
    """The result of BAPO's search on the update's own tokens; None for a rule that does not run it."""

    others: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further metrics of a rule by name, each 0-dim."""


class ClipRule(ABC):
    """Chooses the clip bounds of each update, or the weight of each token in it.

    Both are the same on every rank if every rank closes an update with the tally of all ranks.
    """

    needs_tally_first = False
    """Whether an update's bounds come from its own tokens, which must then be tallied before the update is trained."""

    searches = True
    """Whether bounds or weights are solved from an update's tally. The time that this takes is then a metric."""

    follows_updates = False
    """Whether bounds or weights depend on earlier updates. A resumed run then needs the `state_dict`."""

    has_weights = False
    """Whether the rule gives weights instead of bounds. Nothing is clipped then."""

    config: ClipConfig
    lower: torch.Tensor  # 0-dim, float64
    upper: torch.Tensor
    _sums: ContributionTally | None = None  # of the running update
    _average: ContributionTally | None = None  # over the updates before, for a rule that follows them

    def bounds(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the (lower, upper) importance ratios to clip these tokens to: 0-dim, or one value per token."""
        return self.lower, self.upper

    def weights(self, tokens: Tokens) -> torch.Tensor | None:
        """Return the weight w of each token in the policy gradient, sum of w A grad log pi, in the tokens' shape.

        None, for a rule with bounds: the gradient is that of the clipped surrogate.
        """
        return None

    def gradient_weights(self, tokens: Tokens) -> torch.Tensor:
        """Return the factor of A grad log pi per token: its weight, or its ratio inside the bounds and 0 outside."""
        if (weights := self.weights(tokens)) is not None:
            return weights
        lower, upper = (bound.to(tokens.ratio.dtype) for bound in self.bounds(tokens))
        inside = torch.where(tokens.advantages > 0, tokens.ratio <= upper, tokens.ratio >= lower)
        return torch.where(inside, tokens.ratio, 0.0)

    def tally(self, tokens: Tokens) -> None:
        """Add the tokens of one micro-batch to the running update."""
        self.to(tokens.ratio.device)
        part = self._tally(tokens)
        self._sums = part if self._sums is None else self._sums + part

    def close_update(
        self,
        all_reduce: Callable[[ContributionTally], ContributionTally] | None = None,
        is_skipped: bool = False,
    ) -> UpdateBounds:
        """Close the running update with all that was tallied, and choose the next bounds.

        Every rank must call it for the same updates. At least one micro-batch has been tallied. If a token has a value
        that is not finite, or a weight below 0, the update's shares are NaN, and a rule that follows updates stays as
        it was. `leave_out_nonfinite` (rules/rule_loss.py) masks such tokens.

        Args:
            all_reduce: adds a tally over all ranks; None: this process alone.
            is_skipped: whether the optimizer step was skipped, so that what follows earlier updates stays as it was.
        """
        sums, self._sums = self._sums, None
        assert sums is not None, "nothing was tallied"
        before = self.state_dict() if is_skipped else {}
        closed = self._update(sums if all_reduce is None else all_reduce(sums))
        if is_skipped and self.follows_updates:
            self.load_state_dict(before)
        return closed

    @property
    def has_open_update(self) -> bool:
        """Whether something was tallied since the last update was closed."""
        return self._sums is not None

    def to(self, device: torch.device) -> None:
        """Keep the rule's tensors, such as its bounds, on the device of the tokens."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))
        if self._average is not None:
            self._average = ContributionTally(self._average.sums.to(device))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what a resumed run needs: the bounds, and the averaged tally if there is one."""
        average = {} if self._average is None else {"tally": self._average.sums}
        return {"lower": self.lower, "upper": self.upper, **average}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a `state_dict` of a rule with the same settings."""
        self.lower, self.upper = state["lower"], state["upper"]
        self._average = ContributionTally(state["tally"]) if "tally" in state else None

    @abstractmethod
    def _tally(self, tokens: Tokens) -> ContributionTally:
        """Return what the tokens of a micro-batch add to the update; sums alone, so that ranks can be added."""

    @abstractmethod
    def _update(self, tally: ContributionTally) -> UpdateBounds:
        """Choose the bounds or weights from the whole update's tally; return what the update was trained with."""


class FixedBounds(ClipRule):
    """The same bounds for every update, as in PPO and GRPO; measures the shares at them.

    Args:
        lower: importance ratio, at most 1; at or below 0 the lower bound never clips.
        upper: importance ratio, at least 1.

    Raises:
        ValueError: if 1 does not lie between the bounds.
    """

    searches = False

    def __init__(self, lower: float, upper: float) -> None:
        if not lower <= 1 <= upper:
            raise ValueError(f"bounds {lower:g}, {upper:g} are not allowed; they must satisfy lower <= 1 <= upper")
        self.config = ClipConfig()  # for the shares: contribution of section 4.2, target of section 5.1
        # No ratio lies beyond 0 and MOST_RATIO, and the sums of a tally have no value at infinity.
        self.lower, self.upper = torch.tensor([lower, upper], dtype=torch.float64).clamp(0, MOST_RATIO).unbind()

    def _tally(self, tokens: Tokens) -> ContributionTally:
        return tally_at_bounds(tokens.ratio, tokens.advantages, tokens.weight, self.lower, self.upper)

    def _update(self, tally: ContributionTally) -> UpdateBounds:
        return UpdateBounds(measure_clip_bounds(tally, self.lower, self.upper, self.config), None)


class SearchedBounds(ClipRule):
    """BAPO's Algorithm 1 (section 4.2): the bounds of each update are searched on its own tokens, before it is trained.

    Args:
        config: the search. Until the first update is closed, the bounds are the start of its path.
    """

    needs_tally_first = True

    def __init__(self, config: ClipConfig) -> None:
        self.config = config
        start = config.lower_grid()[0], config.upper_grid()[0]
        self.lower, self.upper = torch.tensor(start, dtype=torch.float64).unbind()

    def _tally(self, tokens: Tokens) -> ContributionTally:
        return tally_contributions(tokens.ratio, tokens.advantages, tokens.weight, self.config)

    def _update(self, tally: ContributionTally) -> UpdateBounds:
        bounds = solve_clip_bounds(tally, self.config)
        self.lower, self.upper = bounds.lower, bounds.upper
        return UpdateBounds(bounds, bounds)


class SteadyBounds(ClipRule):
    """Bounds that follow the updates before (ours), so that no update needs an additional forward pass.

    Bounds that are searched on each update's own tokens jump from update to update. Here the tally of an update comes
    from the ratios that training computes, and gives the bounds of the next update:

        update k:  train between (lower, upper) -> tally of its tokens -> search -> (lower, upper) of update k + 1

    With smoothing of "bounds" the found bounds are averaged, and each update's weight halves every `half_life` updates.
    With "tally" the tallies are averaged, and the search runs on the average. If positive shares scatter around the
    target, the first settles inside the ranges; the second may never reach the target and then stays in the far corner.

    The bounds never leave the ranges of the search.

    Args:
        config: the search, and with it the ranges.
        smoothing: how slowly the bounds follow; None: `config.smoothing`.

    Raises:
        ValueError: for a start outside the ranges, or without smoothing.
    """

    follows_updates = True

    def __init__(self, config: ClipConfig, smoothing: SmoothingConfig | None = None) -> None:
        smoothing = smoothing or config.smoothing
        if smoothing is None:
            raise ValueError("smoothing None is not allowed with SteadyBounds; give a SmoothingConfig")
        self.config = replace(config, smoothing=smoothing)  # checks the start
        self.smoothing = smoothing
        middle = [(grid[0] + grid[-1]) / 2 for grid in (config.lower_grid(), config.upper_grid())]
        self.lower, self.upper = torch.tensor(smoothing.start or middle, dtype=torch.float64).unbind()
        self._keep = 0.5 ** (1 / smoothing.half_life)

    def _tally(self, tokens: Tokens) -> ContributionTally:
        # The search's columns, then those at the bounds, so that one collective reduces both.
        values = tokens.ratio, tokens.advantages, tokens.weight
        parts = tally_contributions(*values, self.config), tally_at_bounds(*values, self.lower, self.upper)
        return ContributionTally(torch.cat([part.sums for part in parts], dim=1))

    def _update(self, tally: ContributionTally) -> UpdateBounds:
        num_at_bounds = 4  # two buckets per side
        searched, at_bounds = map(ContributionTally, tally.sums.tensor_split([-num_at_bounds], dim=1))
        used = measure_clip_bounds(at_bounds, self.lower, self.upper, self.config)
        return UpdateBounds(used, self.follow(searched))

    @torch.no_grad()
    def follow(self, tally: ContributionTally) -> ClipBounds:
        """Let the bounds follow an update; returns the result of the search on that update alone.

        An update without a token to balance changes nothing, and neither does one with a value that is not finite.

        Args:
            tally: `tally_contributions` of all tokens of the update, on all ranks.
        """
        found = wanted = solve_clip_bounds(tally, self.config)
        self.to(tally.sums.device)
        # A sum that is not finite would stay in the average for good.
        is_finite = tally.sums.isfinite().all()
        weight = (1 - self._keep) * (is_finite & found.initial_share.isfinite()).double()
        if self.smoothing.of == "tally":
            before = torch.zeros_like(tally.sums) if self._average is None else self._average.sums
            # The weights sum to less than 1 at first; shares do not change with the scale.
            averaged = before + weight * (tally.sums - before)
            self._average = ContributionTally(torch.where(is_finite, averaged, before))
            wanted = solve_clip_bounds(self._average, self.config)
            weight = wanted.initial_share.isfinite().double()
        # lerp ends exactly at its end point, where rounding could carry a weighted sum past the end of a range.
        self.lower, self.upper = self.lower.lerp(wanted.lower, weight), self.upper.lerp(wanted.upper, weight)
        return found


def make_clip_rule(config: ClipConfig) -> ClipRule:
    """Return BAPO's rule with these settings: steady bounds where smoothing is asked for, else searched bounds."""
    return SearchedBounds(config) if config.smoothing is None else SteadyBounds(config)
