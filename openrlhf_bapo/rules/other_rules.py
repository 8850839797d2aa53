"""The clip rules of other methods for stale data, and the balance in closed form (ours).

r = pi_theta / pi_behavior, A the advantage, and PPO's gradient is the sum of r A grad log pi over tokens inside the
bounds.

    rule                  bounds or weights                                               source
    SecondMomentBounds    [e^-t, e^t], t from a budget for the mean of (log r)^2          M2PO, arXiv 2510.01161
    DivergenceBounds      per token: [1 - d / pi_behavior, 1 + d / pi_behavior]           DPPO, arXiv 2602.04879
    TaperedWeights        weight 1 where A > 0, min(r, 1) where A < 0                     TOPR, arXiv 2503.14286
    BalancedWeights       the same, with A < 0 scaled by min(1, P (1 - rho) / (rho N))    ours
"""

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch

from openrlhf_bapo.rules.clip_bounds import ClipBounds, ContributionTally, measure_clip_bounds, tally_at_bounds
from openrlhf_bapo.rules.clip_config import PRESETS, ClipConfig
from openrlhf_bapo.rules.clip_rules import MOST_RATIO, ClipRule, Tokens, UpdateBounds, make_clip_rule
from openrlhf_bapo.rules.own_rules import (
    installed_rules,
    is_own_rule,
    load_own_rule,
    located,
    make_own_rule,
    own_settings,
)
from openrlhf_bapo.rules.second_moment import measure_second_moment, solve_second_moment, tally_second_moment
from openrlhf_bapo.rules.staleness_weights import LEVELS, tapered_weights


class _OtherRule(ClipRule):
    """A rule without BAPO's search, with the positive share of the gradient. The initial bounds clip nothing."""

    searches = False

    def __init__(self) -> None:
        self.config = ClipConfig(contribution="gradient")
        self.lower, self.upper = torch.tensor([0.0, MOST_RATIO], dtype=torch.float64).unbind()


class _AveragedRule(_OtherRule):
    """A rule that uses the tally of an update, or an average over the updates before it (ours).

    Args:
        half_life: 0: an update uses its own tally, and needs it first. Above 0: an update's weight in the average
            halves every `half_life` updates, and no update needs an extra forward pass. The first update is trained
            without bounds, or with TOPR's weights.

    Raises:
        ValueError: for a half-life that is negative or not finite.
    """

    searches = True

    def __init__(self, half_life: float) -> None:
        super().__init__()
        if not 0 <= half_life < math.inf:
            raise ValueError(f"half_life {half_life} is not allowed; it must be 0 or more, and finite")
        self.needs_tally_first = half_life == 0
        self.follows_updates = half_life > 0
        self._keep = 0.5 ** (1 / half_life) if half_life else 0.0

    def _averaged(self, tally: ContributionTally) -> ContributionTally:
        """Return the average with this tally in it, up to a constant factor."""
        if not self.follows_updates:
            return tally
        before = torch.zeros_like(tally.sums) if self._average is None else self._average.sums
        # A sum that is not finite would stay in the average for good.
        is_finite = tally.sums.isfinite().all()
        self._average = ContributionTally(torch.where(is_finite, self._keep * before + tally.sums, before))
        return self._average


class SecondMomentBounds(_AveragedRule):
    """Bounds that keep the mean of (log r)^2 over harmful tokens within a budget (M2PO, arXiv 2510.01161).

    rules/second_moment.py has the formula. M2PO's authors find t for each micro-batch. One t per update, and the
    average, are ours.

    Args:
        budget: allowed mean of the squared log-ratio, above 0. The default is M2PO's.
        half_life: half-life of the average, in updates; 0: no average.

    Raises:
        ValueError: for a budget or half-life that is not allowed.
    """

    def __init__(self, budget: float = 0.04, half_life: float = 0.0) -> None:
        super().__init__(half_life)
        if not 0 < budget < math.inf:
            raise ValueError(f"budget {budget} is not allowed; it must be above 0 and finite")
        self.budget = budget

    def _tally(self, tokens: Tokens) -> ContributionTally:
        return tally_second_moment(tokens.ratio, tokens.advantages, tokens.weight)

    def _update(self, tally: ContributionTally) -> UpdateBounds:
        t = solve_second_moment(self._averaged(tally), self.budget)
        before, self.lower, self.upper = self.upper.log(), (-t).exp(), t.exp()
        used = measure_second_moment(tally, t if self.needs_tally_first else before, self.config)
        return UpdateBounds(used, None)


class TokenBounds(_OtherRule):
    """A rule with bounds for each token; a subclass has `bounds`, from the tokens alone.

    Its settings are the parameters of its constructor, each kept as an attribute of the same name.
    """

    @abstractmethod
    def bounds(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (lower, upper), in the tokens' shape, with lower <= upper."""

    def _tally(self, tokens: Tokens) -> ContributionTally:
        lower, upper = self.bounds(tokens)
        # A min(r, bound) = (A bound) min(r / bound, 1)
        bound = torch.where(tokens.advantages > 0, upper, lower).clamp(1 / MOST_RATIO, MOST_RATIO)
        one = self.lower.new_ones(())
        return tally_at_bounds(tokens.ratio / bound, tokens.advantages * bound, tokens.weight, one, one)

    def _update(self, tally: ContributionTally) -> UpdateBounds:
        one = self.lower.new_ones(())
        return UpdateBounds(_without_bounds(measure_clip_bounds(tally, one, one, self.config)), None)


class DivergenceBounds(TokenBounds):
    """Bounds per token on the difference of probabilities (DPPO with total variation, arXiv 2602.04879).

    DPPO leaves a token out if A > 0 and pi - pi_behavior > d, or A < 0 and pi_behavior - pi > d. Divided by
    pi_behavior, these are PPO's clips at the bounds 1 + d / pi_behavior and 1 - d / pi_behavior, so the clipped
    surrogate between them has DPPO's gradient.

    Args:
        threshold: d, in (0, 1).

    Raises:
        ValueError: for another threshold.
    """

    def __init__(self, threshold: float = 0.2) -> None:
        super().__init__()
        if not 0 < threshold < 1:
            raise ValueError(f"threshold {threshold} is not allowed; it must lie in (0, 1)")
        self.threshold = threshold

    def bounds(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (lower, upper), in the tokens' shape; a lower bound of nearly 0 never clips."""
        distance = (math.log(self.threshold) - tokens.behavior_log_probs.to(tokens.ratio.dtype)).exp()
        return (1 - distance).clamp(min=1 / MOST_RATIO), (1 + distance).clamp(max=MOST_RATIO)


class WeightRule(_OtherRule):
    """A rule that weighs each token and clips nothing; a subclass has `weights`, from the tokens alone.

    Its settings are the parameters of its constructor, each kept as an attribute of the same name.
    """

    has_weights = True

    @abstractmethod
    def weights(self, tokens: Tokens) -> torch.Tensor:
        """Return the weights, at least 0, in the tokens' shape."""

    def _tally(self, tokens: Tokens) -> ContributionTally:
        weights = self.weights(tokens).to(tokens.ratio.dtype)
        return tally_at_bounds(weights, tokens.advantages, tokens.weight, self.lower, self.upper)

    def _update(self, tally: ContributionTally) -> UpdateBounds:
        return UpdateBounds(_without_bounds(measure_clip_bounds(tally, self.lower, self.upper, self.config)), None)


class TaperedWeights(WeightRule):
    """Weight 1 for positive tokens and min(r, 1) for negative ones, and no clip (TOPR, arXiv 2503.14286).

    Args:
        level: the ratio in the weight: of each "token", or of the "sequence" (TOPR's), the product over its tokens.

    Raises:
        ValueError: for another level.
    """

    def __init__(self, level: str = "sequence") -> None:
        super().__init__()
        if level not in LEVELS:
            raise ValueError(f"level {level!r} is not allowed; it must be one of {LEVELS}")
        self.level = level

    def weights(self, tokens: Tokens) -> torch.Tensor:
        """Return the weights, in the tokens' shape; level "sequence" takes [batch, tokens]."""
        return _tapered(tokens, self.level)


class BalancedWeights(_AveragedRule):
    """TOPR's weights, and negative tokens scaled down until positive ones carry their share (ours).

    BAPO's search (section 4.2) lets positive tokens in and keeps negative ones out. Weights need no search. P and N are
    the sums of m |A| w over positive and negative tokens with TOPR's weights w. The positive share equals the target if
    negative tokens are scaled by

        s = P (1 - target) / (target N)

    Negative tokens weigh min(1, s) min(r, 1).

    Args:
        target: the positive share, in (0, 1).
        half_life: half-life of the average of P and N, in updates; 0: P and N of each update.
        level: the ratio in the weight, as in `TaperedWeights`.

    Raises:
        ValueError: for a target, half-life or level that is not allowed.
    """

    has_weights = True

    def __init__(self, target: float = 0.5, half_life: float = 0.0, level: str = "token") -> None:
        super().__init__(half_life)
        if not 0 < target < 1:
            raise ValueError(f"target {target} is not allowed; it must lie in (0, 1)")
        if level not in LEVELS:
            raise ValueError(f"level {level!r} is not allowed; it must be one of {LEVELS}")
        self.target = target
        self.level = level
        self.negative_weight = self.lower.new_ones(())
        """min(1, s) for the next update that is trained."""

    def weights(self, tokens: Tokens) -> torch.Tensor:
        """Return the weights, in the tokens' shape; level "sequence" takes [batch, tokens]."""
        weights = _tapered(tokens, self.level)
        return torch.where(tokens.advantages > 0, weights, weights * self.negative_weight.to(weights))

    def _tally(self, tokens: Tokens) -> ContributionTally:
        weights = _tapered(tokens, self.level)
        return tally_at_bounds(weights, tokens.advantages, tokens.weight, self.lower, self.upper)

    def _update(self, tally: ContributionTally) -> UpdateBounds:
        before = self.negative_weight
        positive, negative = _sides(self._averaged(tally))
        scale = positive * (1 - self.target) / (self.target * negative)
        self.negative_weight = torch.where(positive + negative > 0, scale, 1.0).clamp(max=1.0)
        used = self.negative_weight if self.needs_tally_first else before
        positive, negative = _sides(tally)
        share = positive / (positive + used * negative)
        bounds = _without_bounds(measure_clip_bounds(tally, self.lower, self.upper, self.config))
        bounds = replace(bounds, positive_share=share, surrogate_share=share, gradient_share=share)
        return UpdateBounds(bounds, None, {"negative_weight": used})

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return s and the averaged tally."""
        return super().state_dict() | {"negative_weight": self.negative_weight}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from a `state_dict` of a rule with the same settings."""
        super().load_state_dict(state)
        self.negative_weight = state["negative_weight"]


RULES: dict[str, type[ClipRule]] = {
    "m2": SecondMomentBounds,
    "divergence": DivergenceBounds,
    "topr": TaperedWeights,
    "balanced": BalancedWeights,
}
"""The rules of this module by the name that `--policy_loss`, TRL's `bapo` and verl's `rule` have for them."""


def as_clip_rule(given: ClipRule | ClipConfig | str) -> ClipRule:
    """Return the clip rule that is given: a rule itself, BAPO's settings, or a name.

    A name is that of a preset, of an installed rule, or a name for `make_rule`.

    Raises:
        ValueError: if no preset and no rule has this name.
    """
    if isinstance(given, ClipRule):
        return given
    if isinstance(given, ClipConfig):
        return make_clip_rule(given)
    name = given if isinstance(given, str) else ""
    if name in PRESETS:
        return make_clip_rule(PRESETS[name])
    name = name if name in RULES else located(name)
    if name not in RULES and not is_own_rule(name):
        allowed = *PRESETS, *RULES, *installed_rules(), "FILE.py:CLASS", "MODULE:CLASS"
        raise ValueError(f"clip rule {given!r} is unknown; allowed: {', '.join(allowed)}")
    return make_rule(name, {})


def default_settings(name: str) -> dict[str, Any]:
    """Return the settings of the rule of that name with their defaults; a name in `RULES`, or of a rule of one's own.

    Raises:
        ValueError: for a rule of one's own that cannot be loaded.
    """
    return own_settings(rule_class(name))


def rule_class(name: str) -> type[ClipRule]:
    """Return the class of the rule of that name, as `default_settings` takes it.

    Raises:
        ValueError: for a rule of one's own that cannot be loaded.
    """
    return RULES[name] if name in RULES else load_own_rule(name)


def make_rule(name: str, settings: dict[str, Any]) -> ClipRule:
    """Return the rule of that name with these settings in place of its defaults.

    Raises:
        ValueError: for a setting that is not allowed, and for a rule of one's own that does not work.
    """
    return RULES[name](**settings) if name in RULES else make_own_rule(name, settings)


def _tapered(tokens: Tokens, level: str) -> torch.Tensor:
    log_ratio = tokens.log_probs.detach() - tokens.behavior_log_probs
    return tapered_weights(log_ratio, tokens.advantages, tokens.weight, level)


def _sides(tally: ContributionTally) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of m |A| w over positive and over negative tokens."""
    positive, negative = tally.sums[0].tensor_split(2)
    return positive.sum(), negative.sum()


def _without_bounds(bounds: ClipBounds) -> ClipBounds:
    """Return the same shares with NaN as bounds, for a rule without bounds that hold for all tokens."""
    none = bounds.lower.new_full((), torch.nan)
    return replace(bounds, lower=none, upper=none)
