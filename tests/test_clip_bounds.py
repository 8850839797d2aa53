"""The clip-bound search: properties first, against Algorithm 1 as a plain loop."""

import functools
import math
import operator
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from reference import contributions, search, walk
from strategies import advantages, as_tensors, clip_configs, ratios, tokens

from openrlhf_bapo import ClipBounds, ClipConfig, find_clip_bounds, solve_clip_bounds, tally_contributions


def equal(a: ClipBounds, b: ClipBounds, rel: float = 0.0) -> bool:
    """Whether two results agree: bounds and `reached` exactly, shares within `rel`."""
    for field in fields(ClipBounds):
        x, y = float(getattr(a, field.name)), float(getattr(b, field.name))
        exact = field.name in ("lower", "upper", "reached")
        if not (math.isnan(x) and math.isnan(y)) and not math.isclose(x, y, rel_tol=0 if exact else rel):
            return False
    return True


def near_a_decision(token_list, config, margin: float) -> bool:
    """Whether another rounding may decide otherwise: a share near the target, or a ratio near a bound."""
    active = [token for token in token_list if token[2] > 0 and token[1] != 0]
    target = config.positive_contribution_target
    for lower, upper in walk(config):
        p, n = contributions(active, lower, upper, config.contribution)
        value = (p / (p + n) if p + n else math.nan) if config.target_kind == "share" else p / (n + 1e-8)
        if abs(value - target) <= margin * max(1, target) or (p + n and min(p, n) / (p + n) < margin):
            return True
        if any(abs(ratio - bound) <= margin * bound for ratio, _, _ in active for bound in (lower, upper)):
            return True
    return False


@given(tokens(), clip_configs())
def test_agrees_with_a_plain_loop_over_the_path(token_list, config):
    assume(not near_a_decision(token_list, config, 1e-9))
    found, expected = find_clip_bounds(*as_tensors(token_list), config), search(token_list, config)
    for name, value in expected.items():
        assert float(getattr(found, name)) == pytest.approx(float(value), rel=1e-9, nan_ok=True), name
    assert (float(found.lower), float(found.upper)) == (expected["lower"], expected["upper"])


@given(clip_configs())
@example(ClipConfig(ratio_lower_start=0.05, ratio_lower_max=1.0, ratio_lower_step=0.010000000000000002))
def test_no_bound_on_the_path_lies_outside_its_range(config):
    for grid, start, stop in (
        (config.lower_grid(), config.ratio_lower_start, config.ratio_lower_max),
        (config.upper_grid(), config.ratio_upper_start, config.ratio_upper_max),
    ):
        assert grid[0] == start and grid == sorted(grid) and grid[-1] <= stop


@given(tokens(), clip_configs())
def test_clip_fractions_count_the_tokens_outside_the_bounds(token_list, config):
    found = find_clip_bounds(*as_tensors(token_list), config)
    for sign, fraction, outside in (
        (1, found.clip_frac_positive, lambda ratio: ratio > found.upper),
        (-1, found.clip_frac_negative, lambda ratio: ratio < found.lower),
    ):
        side = [ratio for ratio, advantage, weight in token_list if weight > 0 and advantage * sign > 0]
        expected = sum(bool(outside(ratio)) for ratio in side) / max(len(side), 1)
        assert float(fraction) == pytest.approx(expected)


@given(tokens(), clip_configs(), st.lists(st.integers(0, 40), max_size=4), st.randoms())
def test_split_into_tallies_and_order_do_not_matter(token_list, config, cuts, random):
    assume(not near_a_decision(token_list, config, 1e-9))
    whole = find_clip_bounds(*as_tensors(token_list), config)
    random.shuffle(token_list)
    edges = [0, *sorted(min(cut, len(token_list)) for cut in cuts), len(token_list)]
    parts = [tally_contributions(*as_tensors(token_list[a:b]), config) for a, b in zip(edges, edges[1:], strict=False)]
    assert equal(solve_clip_bounds(functools.reduce(operator.add, parts), config), whole, rel=1e-9)


@given(tokens(), clip_configs(), st.lists(st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 1e300]), min_size=2))
def test_padding_and_garbage_under_the_mask_do_not_matter(token_list, config, garbage):
    padding = [(value, garbage[i - 1], 0.0) for i, value in enumerate(garbage)]
    plain = find_clip_bounds(*as_tensors(token_list), config)
    ratio, advantage, mask = as_tensors(token_list + padding)
    assert equal(find_clip_bounds(ratio, advantage, mask, config), plain, rel=1e-12)
    two_dim = [x.repeat(2, 1) for x in (ratio, advantage, mask)]
    two_dim[2][1] = 0
    assert equal(find_clip_bounds(*two_dim, config), plain, rel=1e-12)


@given(tokens(min_size=1), clip_configs(contribution="gradient", target_kind="share"))
def test_share_is_monotone_along_the_path_for_gradient(token_list, config):
    active = [token for token in token_list if token[2] > 0]
    shares = []
    for lower, upper in walk(config):
        fixed = replace(
            config,
            **dict(ratio_lower_start=lower, ratio_lower_max=lower, ratio_upper_start=upper, ratio_upper_max=upper),
        )
        shares.append(float(find_clip_bounds(*as_tensors(active), fixed).positive_share))
    shares = [share for share in shares if not math.isnan(share)]
    assert all(b >= a - 1e-12 for a, b in zip(shares, shares[1:], strict=False))


@given(tokens(), clip_configs())
def test_float32_agrees_with_float64(token_list, config):
    assume(not near_a_decision(token_list, config, 1e-5))
    single, double = (
        find_clip_bounds(*as_tensors(token_list, dtype), config) for dtype in (torch.float32, torch.float64)
    )
    assert equal(single, double, rel=1e-5)


@given(st.lists(st.tuples(ratios(), advantages(signs=(1,)), st.just(1.0)), min_size=1), clip_configs())
def test_only_positive_tokens_reach_a_share_target_at_once(token_list, config):
    config = replace(config, contribution="surrogate", target_kind="share", positive_contribution_target=0.9)
    found = find_clip_bounds(*as_tensors(token_list), config)
    assert found.reached and float(found.positive_share) == 1.0
    assert (float(found.lower), float(found.upper)) == (config.ratio_lower_start, config.ratio_upper_start)


@given(st.lists(st.tuples(ratios(), advantages(signs=(-1,)), st.just(1.0)), min_size=1), clip_configs())
def test_only_negative_tokens_end_in_the_far_corner_unreached(token_list, config):
    config = replace(config, contribution="surrogate")
    found = find_clip_bounds(*as_tensors(token_list), config)
    assert not found.reached and float(found.positive_share) == 0.0
    assert (float(found.lower), float(found.upper)) == (config.lower_grid()[-1], config.upper_grid()[-1])


@given(clip_configs(), st.lists(st.tuples(ratios(), advantages(), st.just(0.0))))
def test_without_an_active_token_the_start_is_kept_and_counts_as_reached(config, token_list):
    found = find_clip_bounds(*as_tensors(token_list), config)
    assert found.reached and math.isnan(found.positive_share) and math.isnan(found.initial_share)
    assert (float(found.lower), float(found.upper)) == (config.ratio_lower_start, config.ratio_upper_start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ratio_on_a_bound_is_inside_it(dtype):
    config = ClipConfig(contribution="gradient", positive_contribution_target=0.001)
    ratio = torch.tensor([config.ratio_upper_start, config.ratio_lower_start], dtype=dtype)
    found = find_clip_bounds(ratio, torch.tensor([1.0, -1.0]), torch.ones(2), config)
    assert float(found.positive_share) == pytest.approx(1.2 / 1.8)
    assert float(found.clip_frac_positive) == float(found.clip_frac_negative) == 0


def test_grid_points_come_from_the_integer_so_that_rounding_does_not_pile_up():
    assert ClipConfig().lower_grid() == [0.6 + k * 0.02 for k in range(16)]
    assert ClipConfig().upper_grid() == [1.2 + k * 0.05 for k in range(37)]
    assert ClipConfig(ratio_upper_max=2.02).upper_grid()[-1] == 1.2 + 16 * 0.05  # the range is no multiple of the step


def test_presets_hold_the_published_settings():
    shared = dict(ratio_upper_start=1.2, ratio_upper_step=0.05, contribution="surrogate")
    published = {
        "readme": dict(
            positive_contribution_target=0.5, ratio_lower_start=0.6, ratio_lower_max=0.9, ratio_upper_max=3.0
        ),
        "paper": dict(
            positive_contribution_target=0.4, ratio_lower_start=0.6, ratio_lower_max=0.9, ratio_upper_max=3.0
        ),
        "octothinker": dict(positive_contribution_target=0.45, ratio_lower_start=0.8, ratio_upper_max=2.0),
        "released": dict(
            positive_contribution_target=1.0, ratio_lower_max=0.8, ratio_lower_step=0.05, order="lower_first"
        ),
    }
    for name, settings in published.items():
        preset = ClipConfig.preset(name)
        assert {key: getattr(preset, key) for key in shared | settings} == shared | settings
    assert ClipConfig.preset("released").target_kind == "ratio"
    with pytest.raises(ValueError, match="nonesuch.*readme, paper, octothinker, released"):
        ClipConfig.preset("nonesuch")


def test_released_walks_lower_first_and_compares_p_over_n():
    # P = 0.95 and N = 1 at r = 1: a share of 0.487. The released recipe raises the lower bound, which moves nothing
    # at r = 1, then the upper one, and ends in the corner with its P / N below 1.
    found = find_clip_bounds(
        torch.tensor([1.0, 1.0]), torch.tensor([0.95, -1.0]), torch.ones(2), ClipConfig.preset("released")
    )
    assert (float(found.lower), float(found.upper)) == (0.6 + 4 * 0.05, 1.2 + 16 * 0.05)
    assert not found.reached and float(found.positive_share) == pytest.approx(0.95 / 1.95)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(positive_contribution_target=1.0), r"positive_contribution_target 1.0 .*\(0, 1\)"),
        (dict(positive_contribution_target=0.0), r"positive_contribution_target 0.0 .*\(0, 1\)"),
        (dict(positive_contribution_target=math.nan), "positive_contribution_target nan .*finite"),
        (dict(ratio_lower_start=0.95), "ratio_lower_start 0.95 .*<= ratio_lower_max"),
        (dict(ratio_lower_start=0.0), "ratio_lower_start 0.0 .*0 < ratio_lower_start"),
        (dict(ratio_lower_max=1.1), "ratio_lower_max 1.1 .*<= 1"),
        (dict(ratio_upper_start=0.9), "ratio_upper_start 0.9 .*1 <= ratio_upper_start"),
        (dict(ratio_upper_max=1.1), "ratio_upper_(start|max) .*ratio_upper_start <= ratio_upper_max"),
        (dict(ratio_upper_step=0.0), "ratio_upper_step 0.0 .*above 0"),
        (dict(ratio_lower_step=-0.1), "ratio_lower_step -0.1 .*above 0"),
        (dict(ratio_upper_step=1e-9), "ratio_upper_step 1e-09 .*at least"),
        (dict(contribution="sum"), "contribution 'sum' .*surrogate"),
        (dict(order="both"), "order 'both' .*upper_first"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_field_value_and_range(settings, message):
    with pytest.raises(ValueError, match=message):
        ClipConfig(**settings)
