"""The rules of other methods against a plain reading of their formulas."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from strategies import as_tensors, as_tokens, closed, random_tokens

from openrlhf_bapo import ClipConfig, FixedBounds, TokenBounds
from openrlhf_bapo.rules.bounds_metrics import bounds_metrics
from openrlhf_bapo.rules.clip_bounds import ContributionTally, measure_clip_bounds, tally_at_bounds
from openrlhf_bapo.rules.clip_rules import Tokens
from openrlhf_bapo.rules.other_rules import (
    LEVELS,
    BalancedWeights,
    DivergenceBounds,
    SecondMomentBounds,
    TaperedWeights,
)
from openrlhf_bapo.rules.second_moment import solve_second_moment, tally_second_moment

GRADIENT = ClipConfig(contribution="gradient")


# ---- M2PO ----


def harmful_log_ratios(token_list) -> list[float]:
    return [
        abs(math.log(ratio))
        for ratio, advantage, weight in token_list
        if weight > 0 and ((advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1))
    ]


def moment(updates: list[list[float]], t: float, keep: float = 1.0) -> float:
    """Mean of min(|log r|, t)^2 over the harmful tokens of updates, each update weighing `keep` times the next."""
    weights = [keep**age for age in range(len(updates))][::-1]
    squares = sum(w * min(x, t) ** 2 for w, update in zip(weights, updates, strict=True) for x in update)
    return squares / sum(w * len(update) for w, update in zip(weights, updates, strict=True))


def exact_threshold(updates: list[list[float]], budget: float, keep: float = 1.0) -> float:
    """Return t by bisection of the formula."""
    if not any(updates) or moment(updates, math.inf, keep) < budget:
        return math.inf
    low, high = 0.0, 20.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if moment(updates, middle, keep) >= budget else (middle, high)
    return high


def about(t: float):
    """What the grid allows."""
    return pytest.approx(t, rel=1.1e-3, abs=1.1e-3)


wide_tokens = st.lists(
    st.tuples(
        st.floats(-4, 4).map(math.exp),
        st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0]),
        st.sampled_from([0.0, 0.5, 1.0]),
    ),
    min_size=1,
    max_size=30,
)


@given(wide_tokens, st.sampled_from([0.001, 0.04, 0.5, 4.0]))
@example([(math.exp(-3.0), -1.0, 1.0), (math.exp(2.0), 1.0, 1.0)], 4.0)
@example([(math.exp(-3.0), -1.0, 1.0), (math.exp(1.5), 1.0, 1.0)], 4.0)  # between the two
@example([(math.exp(-20.0), -1.0, 1.0), (math.exp(19.8), 1.0, 1.0)], 385.0)
def test_the_second_moments_threshold_is_the_exact_one_to_a_thousandth(token_list, budget):
    found = float(solve_second_moment(tally_second_moment(*as_tensors(token_list)), budget))
    harmful = [harmful_log_ratios(token_list)]
    assume(not any(harmful) or abs(moment(harmful, math.inf) - budget) > 1e-9)  # else rounding decides
    assert found == about(exact_threshold(harmful, budget))


@pytest.mark.parametrize("factor", [1.0, 0.01])  # an average has counts below 1
def test_a_budget_that_the_tokens_just_use_up_clips_none_of_them(factor):
    for num_near, num_far in itertools.product(range(0, 60, 3), range(1, 60, 3)):
        token_list = [(1.05, 1.0, 1.0)] * num_near + [(0.5, -1.0, 1.0)] * num_far
        tally = tally_second_moment(*as_tensors(token_list))
        budget = moment([harmful_log_ratios(token_list)], math.inf)
        # Sums round: the threshold is that of the farthest tokens, or infinite.
        assert float(solve_second_moment(ContributionTally(tally.sums * factor), budget)) >= math.log(2) - 1e-6


def test_m2s_shares_and_clip_fractions_are_those_at_its_bounds():
    token_list = [(2.0, 1.0, 1.0), (1.05, 3.0, 0.5), (0.5, -1.0, 1.0), (0.9, -1.0, 1.0), (3.0, -2.0, 1.0)]
    used = closed(SecondMomentBounds(budget=0.01), token_list).used
    lower, upper = used.lower, used.upper
    expected = measure_clip_bounds(tally_at_bounds(*as_tensors(token_list), lower, upper), lower, upper, GRADIENT)
    assert (float(used.clip_frac_positive), float(used.clip_frac_negative)) == (1 / 2, 1 / 3)
    for name in ("positive_share", "gradient_share", "surrogate_share", "clip_frac_positive", "clip_frac_negative"):
        assert float(getattr(used, name)) == pytest.approx(float(getattr(expected, name)), abs=1e-3), name


@pytest.mark.parametrize("half_life", [0.0, 2.0])
@given(stream=st.lists(wide_tokens, min_size=1, max_size=4))
def test_m2_bounds_each_update_by_its_own_second_moment_or_with_a_half_life_by_that_of_those_before(half_life, stream):
    rule, keep = SecondMomentBounds(half_life=half_life), 0.5**0.5
    harmful = [harmful_log_ratios(token_list) for token_list in stream]
    t = math.inf  # nothing is clipped before the first update
    for k, token_list in enumerate(stream):
        seen = harmful[: k + 1] if half_life else harmful[k : k + 1]
        assume(not any(seen) or abs(moment(seen, math.inf, keep) - 0.04) > 1e-9)
        tokens = as_tokens(token_list)
        if t == math.inf:
            assert torch.equal(rule.gradient_weights(tokens), tokens.ratio)
        else:
            assert float(rule.upper.log()) == about(t) and -float(rule.lower.log()) == about(t)
        before, t = t, exact_threshold(seen, 0.04, keep)
        used, expected = closed(rule, token_list).used, before if half_life else t
        for bound in (used.upper, 1 / used.lower):
            assert math.isnan(bound) if expected == math.inf else float(bound.log()) == about(expected)
        assert rule.needs_tally_first == (half_life == 0)


# ---- DPPO ----

probabilities = st.floats(0.001, 1.0)


@given(st.lists(st.tuples(probabilities, probabilities, st.sampled_from([-2.0, 0.5])), min_size=1, max_size=20))
def test_divergence_bounds_have_the_gradient_of_dppos_mask(token_list):
    threshold, weights = 0.2, []
    for now, behavior, advantage in token_list:
        distance = now - behavior if advantage > 0 else behavior - now
        assume(abs(distance - threshold) > 1e-9)
        weights.append(now / behavior if distance <= threshold else 0.0)
    now, behavior, advantages = torch.tensor(token_list, dtype=torch.float64).unbind(1)
    log_probs, ones = now.log().requires_grad_(), torch.ones_like(now)
    tokens, rule = Tokens(log_probs, behavior.log(), advantages, ones), DivergenceBounds(threshold)
    expected = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(rule.gradient_weights(tokens), expected)
    ratio = (log_probs - behavior.log()).exp()
    torch.minimum(ratio * advantages, ratio.clamp(*rule.bounds(tokens)) * advantages).sum().backward()
    torch.testing.assert_close(log_probs.grad, expected * advantages)


def test_divergences_shares_and_clip_fractions_are_those_of_its_masked_tokens():
    # (pi, pi at rollout, advantage): the second and the fourth are more than 0.2 apart on the side that clips.
    now, behavior, advantages = torch.tensor(
        [(0.5, 0.4, 1.0), (0.9, 0.3, 2.0), (0.4, 0.5, -1.0), (0.1, 0.6, -2.0), (0.9, 0.2, -1.0)], dtype=torch.float64
    ).unbind(1)
    rule = DivergenceBounds(0.2)
    metrics = bounds_metrics([closed(rule, Tokens(now.log(), behavior.log(), advantages, torch.ones(5)))])
    assert (metrics["bapo/clip_frac_positive"], metrics["bapo/clip_frac_negative"]) == (1 / 2, pytest.approx(1 / 3))
    ratio = (now / behavior).tolist()
    positive, negative = ratio[0], ratio[2] + ratio[4]
    assert metrics["bapo/positive_share"] == pytest.approx(positive / (positive + negative))
    positive, negative = positive + 2 * (1 + 0.2 / 0.3), negative + 2 * (1 - 0.2 / 0.6)
    assert metrics["bapo/surrogate_share"] == pytest.approx(positive / (positive + negative))
    assert not {"bapo/clip_low", "bapo/clip_high"} & metrics.keys()  # there is no one pair


class Everywhere(TokenBounds):
    def bounds(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(tokens.ratio, 0.0), torch.full_like(tokens.ratio, 1.2)


def test_bounds_that_are_the_same_for_each_token_have_the_metrics_of_fixed_bounds():
    tokens = random_tokens(num=8)
    per_token, fixed = (bounds_metrics([closed(rule, tokens)]) for rule in (Everywhere(), FixedBounds(0.0, 1.2)))
    for name in ("surrogate_share", "gradient_share", "clip_frac_positive", "clip_frac_negative"):
        assert per_token[f"bapo/{name}"] == pytest.approx(fixed[f"bapo/{name}"], rel=1e-12), name
    assert 0 < per_token["bapo/clip_frac_positive"] < 1 and "bapo/clip_low" not in per_token


# ---- TOPR, and the balance ----


def topr_weights(tokens: Tokens, level: str) -> list[list[float]]:
    """TOPR's weights as a plain loop; 0 where there is no token."""
    found = []
    for log_probs, behavior, advantages, mask in zip(
        tokens.log_probs, tokens.behavior_log_probs, tokens.advantages, tokens.weight, strict=True
    ):
        row = []
        length = int(mask.sum())
        of_response = math.exp(sum(log_probs[:length].tolist()) - sum(behavior[:length].tolist()))
        for t in range(12):
            ratio = of_response if level == "sequence" else math.exp(log_probs[t] - behavior[t])
            row.append(0.0 if t >= length else 1.0 if advantages[t] > 0 else min(ratio, 1.0))
        found.append(row)
    return found


@given(st.integers(0, 10_000), st.sampled_from(LEVELS))
def test_topr_weighs_negative_tokens_by_their_ratio_or_their_responses_up_to_1(seed, level):
    tokens, rule = random_tokens(seed, num=6), TaperedWeights(level)
    expected = torch.tensor(topr_weights(tokens, level), dtype=torch.float64)
    torch.testing.assert_close(rule.weights(tokens) * tokens.weight, expected, rtol=1e-9, atol=0)
    metrics = bounds_metrics([closed(rule, tokens)])
    assert metrics["bapo/positive_share"] == pytest.approx(share(tokens, expected))
    assert (metrics["bapo/clip_frac_positive"], metrics["bapo/clip_frac_negative"]) == (0, 0)
    assert not {"bapo/clip_low", "bapo/clip_high"} & metrics.keys()


def test_the_ratio_of_a_whole_response_is_topr_s_default_and_is_clamped_as_a_tokens_is():
    log_probs = torch.tensor([[-15.0, -15.0], [15.0, 15.0]])
    tokens = Tokens(log_probs, torch.zeros(2, 2), -torch.ones(2, 2), torch.ones(2, 2))
    assert TaperedWeights().weights(tokens).tolist() == [[pytest.approx(math.exp(-20))] * 2, [1.0, 1.0]]


def sides(tokens: Tokens, weights: torch.Tensor) -> tuple[float, float]:
    """Sums of m |A| w over positive and over negative tokens."""
    sizes = tokens.weight * tokens.advantages.abs() * weights
    return float(sizes[tokens.advantages > 0].sum()), float(sizes[tokens.advantages < 0].sum())


def share(tokens: Tokens, weights: torch.Tensor) -> float:
    positive, negative = sides(tokens, weights)
    return positive / (positive + negative)


@given(st.integers(0, 10_000), st.floats(0.05, 0.95), st.sampled_from(LEVELS))
def test_the_balance_has_its_target_share_wherever_it_scales_negative_tokens_down(seed, target, level):
    tokens, rule = random_tokens(seed, num=6), BalancedWeights(target, level=level)
    update = closed(rule, tokens)
    weights, tapered = rule.weights(tokens), TaperedWeights(level).weights(tokens)
    scale = float(rule.negative_weight)
    assert torch.equal(weights, torch.where(tokens.advantages > 0, tapered, scale * tapered))
    assert 0 < scale <= 1
    found = share(tokens, weights)
    assert found == pytest.approx(target) if scale < 1 else found >= target - 1e-9
    assert bounds_metrics([update])["bapo/positive_share"] == pytest.approx(found)
    assert bounds_metrics([update])["bapo/negative_weight"] == scale


@pytest.mark.parametrize("half_life", [0.5, 3.0])
@given(seeds=st.lists(st.integers(0, 10_000), min_size=2, max_size=5))
def test_the_balance_with_a_half_life_scales_by_the_updates_before(half_life, seeds):
    rule, keep = BalancedWeights(0.7, half_life=half_life), 0.5 ** (1 / half_life)
    positive = negative = 0.0
    scale = 1.0  # of the first update
    assert not rule.needs_tally_first
    for seed in seeds:
        tokens = random_tokens(seed, num=6)
        tapered = TaperedWeights("token").weights(tokens)
        expected = torch.where(tokens.advantages > 0, tapered, scale * tapered)
        torch.testing.assert_close(rule.weights(tokens), expected)
        update = closed(rule, tokens)
        assert float(update.others["negative_weight"]) == pytest.approx(scale)
        assert float(update.used.positive_share) == pytest.approx(share(tokens, expected))
        now = sides(tokens, tapered)
        positive, negative = keep * positive + now[0], keep * negative + now[1]
        scale = min(1.0, positive * 0.3 / (0.7 * negative))


@pytest.mark.parametrize(("sign", "scale"), [(1, 1.0), (-1, 0.0), (0, 1.0)])
def test_the_balance_of_an_update_of_one_sign_drops_what_has_no_counterpart(sign, scale):
    rule = BalancedWeights()
    closed(rule, [(1.0, sign * 1.0, 1.0)])
    assert float(rule.negative_weight) == scale


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (SecondMomentBounds, dict(budget=0.0), "budget 0.0 is not allowed; it must be above 0"),
        (SecondMomentBounds, dict(budget=math.nan), "budget nan is not allowed"),
        (SecondMomentBounds, dict(half_life=-1.0), "half_life -1.0 is not allowed; it must be 0 or more"),
        (BalancedWeights, dict(half_life=math.inf), "half_life inf is not allowed"),
        (BalancedWeights, dict(target=0.0), "target 0.0 is not allowed"),
        (BalancedWeights, dict(target=1.0), r"target 1.0 is not allowed; it must lie in \(0, 1\)"),
        (BalancedWeights, dict(level="response"), "level 'response' is not allowed.*token.*sequence"),
        (TaperedWeights, dict(level="response"), "level 'response' is not allowed.*token.*sequence"),
        (DivergenceBounds, dict(threshold=0.0), r"threshold 0.0 is not allowed; it must lie in \(0, 1\)"),
        (DivergenceBounds, dict(threshold=1.0), "threshold 1.0 is not allowed"),
    ],
)
def test_a_setting_that_is_not_allowed_is_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**settings)
