"""Bounds that follow the updates before: properties, against a plain loop in Python floats."""

import math
from dataclasses import fields, replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from reference import near_a_decision
from strategies import as_tensors, clip_configs, tokens

from openrlhf_bapo import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    SmoothingConfig,
    SteadyBounds,
    find_clip_bounds,
    measure_clip_bounds,
    tally_at_bounds,
    tally_contributions,
)

GRADIENT = ClipConfig(contribution="gradient")
half_lives = st.one_of(st.floats(0.01, 200.0), st.just(1e-9))


def updates(min_size=0, max_size=6):
    """Several updates' tokens, updates without any token among them."""
    return st.lists(tokens(max_size=12), min_size=min_size, max_size=max_size)


def tally(token_list, config) -> ContributionTally:
    return tally_contributions(*as_tensors(token_list), config)


def pair(bounds: SteadyBounds | ClipBounds) -> tuple[float, float]:
    return float(bounds.lower), float(bounds.upper)


@given(updates(), clip_configs(), half_lives, st.booleans())
def test_the_bounds_are_a_decayed_average_of_what_the_search_finds(stream, config, half_life, starts_in_corner):
    grids = config.lower_grid(), config.upper_grid()
    start = tuple(grid[0] for grid in grids) if starts_in_corner else None
    steady = SteadyBounds(config, SmoothingConfig(half_life, start=start))
    lower, upper = start or ((grid[0] + grid[-1]) / 2 for grid in grids)
    keep = 2 ** (-1 / half_life)
    for token_list in stream:
        assert pair(steady) == pytest.approx((lower, upper), rel=1e-12)
        found, alone = steady.follow(tally(token_list, config)), find(token_list, config)
        assert pair(found) == pair(alone)  # what the search finds on this update alone
        if not math.isnan(float(alone.initial_share)):
            lower = keep * lower + (1 - keep) * float(alone.lower)
            upper = keep * upper + (1 - keep) * float(alone.upper)
    assert pair(steady) == pytest.approx((lower, upper), rel=1e-12)


@given(updates(), clip_configs(), half_lives)
@example([[(1.0, -3.0, 1.0)], [(1.0, 1.0, 1.0)]], GRADIENT, 20.0)  # the second alone would stay at the start
@example([[(1.0, -1.5, 1.0)], [(1.0, 1.0, 1.0)]], GRADIENT, 1.0)  # stay at the start, because the first weighs half
def test_of_tally_they_are_what_the_search_finds_on_a_decayed_sum_of_tallies(stream, config, half_life):
    steady = SteadyBounds(config, SmoothingConfig(half_life, of="tally"))
    counted = [token_list for token_list in stream if not math.isnan(float(find(token_list, config).initial_share))]
    for token_list in stream:
        steady.follow(tally(token_list, config))
    # Older updates' tokens weigh less: the search over all tokens with their weights scaled is the same.
    keep = 2 ** (-1 / half_life)
    scaled = [
        (ratio, advantage, weight * keep ** (len(counted) - 1 - age))
        for age, token_list in enumerate(counted)
        for ratio, advantage, weight in token_list
    ]
    assume(not near_a_decision(scaled, config, 1e-9))
    if counted:
        assert pair(steady) == pair(find(scaled, config))


def find(token_list, config) -> ClipBounds:
    return find_clip_bounds(*as_tensors(token_list), config)


@given(tokens(min_size=1), clip_configs())
def test_measured_at_what_the_search_found_shares_and_fractions_are_the_searchs_own(token_list, config):
    found = find(token_list, config)
    bounds = tally_at_bounds(*as_tensors(token_list), found.lower, found.upper)
    measured = measure_clip_bounds(bounds, found.lower, found.upper, config)
    for field in fields(ClipBounds):
        if field.name not in ("initial_share", "reached"):
            expected = float(getattr(found, field.name))
            assert float(getattr(measured, field.name)) == pytest.approx(expected, rel=1e-9, nan_ok=True), field.name


def test_rounding_does_not_carry_a_bound_past_the_end_of_its_range():
    start, before, end = 0.2680244251756223, 0.43728651537447555, 0.9893923781965156
    assert before + (end - before) > end
    config = replace(GRADIENT, ratio_lower_start=start, ratio_lower_max=end, ratio_lower_step=end - start)
    steady = SteadyBounds(config, SmoothingConfig(1e-9, start=(before, 1.2)))
    steady.follow(tally([(1.0, -1.0, 1.0)], config))  # sent to the far corner, at once
    assert float(steady.lower) == config.lower_grid()[-1] == end


def test_a_start_that_is_a_list_as_in_yaml_is_that_of_a_tuple():
    listed, paired = (SteadyBounds(GRADIENT, SmoothingConfig(2.0, start=kind((0.7, 2.0)))) for kind in (list, tuple))
    for steady in (listed, paired):
        steady.follow(tally([(1.0, -1.0, 1.0)], steady.config))
    assert pair(listed) == pair(paired)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(half_life=0.0), "half_life 0.0 .*above 0"),
        (dict(half_life=math.inf), "half_life inf .*finite"),
        (dict(half_life=math.nan), "half_life nan .*finite"),
        (dict(half_life=3.0, of="share"), "of 'share' .*bounds"),
        (dict(half_life=3.0, start=(0.5, 2.0)), r"start \(0.5, 2.0\) .*lower bound must lie in \[0.6, 0.9\]"),
        (dict(half_life=3.0, start=(0.7, 3.5)), r"start \(0.7, 3.5\) .*upper bound must lie in \[1.2, 3\]"),
        (dict(half_life=3.0, start=(math.nan, 2.0)), "start .*lower bound"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SteadyBounds(replace(GRADIENT), SmoothingConfig(**settings))
