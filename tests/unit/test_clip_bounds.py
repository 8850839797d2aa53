"""The clip-bound search: properties first, against Algorithm 1 as a plain loop."""

import functools
import math
import operator
from dataclasses import astuple, fields, replace
from itertools import pairwise

import pipeline
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given
from hypothesis import strategies as st
from reference import near_a_decision, search, walk
from strategies import advantages, as_tensors, clip_configs, ratios, tokens

from openrlhf_bapo import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    find_clip_bounds,
    solve_clip_bounds,
    tally_contributions,
)
from openrlhf_bapo.rules.clip_config import DEFAULT_PRESET, PRESETS, SmoothingConfig


def equal(a: ClipBounds, b: ClipBounds, rel: float = 0.0) -> bool:
    """Whether two results agree: bounds and `reached` exactly, shares within `rel`."""
    for field in fields(ClipBounds):
        x, y = float(getattr(a, field.name)), float(getattr(b, field.name))
        exact = field.name in ("lower", "upper", "reached")
        if not (math.isnan(x) and math.isnan(y)) and not math.isclose(x, y, rel_tol=0 if exact else rel):
            return False
    return True


# (ratio, advantage, weight), on both sides of every bound of ClipConfig().
OUTSIDE = [(0.2, -2.0, 0.25), (0.4, -1.0, 1.0), (0.95, -0.6, 1.0), (1.1, 0.7, 0.5), (2.52, 1.0, 1.0), (3.5, 0.3, 1.0)]


@given(tokens(), clip_configs())
@example(OUTSIDE, ClipConfig(positive_contribution_target=0.99))
@example(OUTSIDE, ClipConfig(positive_contribution_target=0.99, contribution="gradient"))
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
@example(OUTSIDE, ClipConfig())
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
    parts = [tally_contributions(*as_tensors(token_list[a:b]), config) for a, b in pairwise(edges)]
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


@pytest.mark.parametrize("size", [1, 8, 70_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("ratio", "advantages") for value in (math.nan, math.inf)),
        ("advantages", -math.inf),
        ("mask", -1.0),
        ("mask", -1e-3),
        ("mask", math.nan),
    ],
)
def test_a_token_that_is_not_finite_or_weighs_less_than_0_is_refused_at_every_size_unless_it_is_masked(
    size, dtype, name, value
):
    generator = torch.Generator().manual_seed(size)
    given_ = dict(
        ratio=(0.5 * torch.randn(size, generator=generator)).exp(),
        advantages=torch.randn(size, generator=generator),
        mask=torch.rand(size, generator=generator),
    )
    given_ = {name: column.to(dtype) for name, column in given_.items()}
    find_clip_bounds(**given_, config=ClipConfig())
    given_[name][size // 2] = value
    with pytest.raises(ValueError, match=r"not finite, or a weight below 0; .* a mask of 0$"):
        find_clip_bounds(**given_, config=ClipConfig())
    given_["mask"][size // 2] = 0.0
    find_clip_bounds(**given_, config=ClipConfig())


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
    assert all(b >= a - 1e-12 for a, b in pairwise(shares))


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


@pytest.mark.parametrize(("token", "reached"), [((1.5, 1.0, 1.0), True), ((0.7, -1.0, 1.0), False)])
def test_there_is_nothing_to_balance_only_if_no_token_has_a_gradient_at_the_start(token, reached):
    config = ClipConfig(contribution="gradient")
    found, point = find_clip_bounds(*as_tensors([token]), config), 0 if reached else -1
    assert bool(found.reached) == reached
    assert (float(found.lower), float(found.upper)) == (config.lower_grid()[point], config.upper_grid()[point])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_a_ratio_on_any_bound_of_the_grid_is_inside_it_and_the_next_number_beyond_is_not(dtype, contribution):
    beyond = {"lower": torch.tensor(0.0, dtype=dtype), "upper": torch.tensor(9.0, dtype=dtype)}
    grids = {"lower": ClipConfig().lower_grid(), "upper": ClipConfig().upper_grid()}
    for side, bound in ((side, bound) for side, grid in grids.items() for bound in grid):
        # The bound as the loss clamps with it: rounded to the ratio's precision, up or down.
        ratio = torch.tensor(bound, dtype=dtype)
        fixed = {f"ratio_{side}_start": bound, f"ratio_{side}_max": bound}
        config = ClipConfig(contribution=contribution, positive_contribution_target=0.01, **fixed)
        advantages = torch.tensor([1.0 if side == "upper" else -1.0])
        for value, outside in ((ratio, 0), (torch.nextafter(ratio, beyond[side]), 1)):
            found = find_clip_bounds(value[None], advantages, torch.ones(1), config)
            assert float(found.clip_frac_positive if side == "upper" else found.clip_frac_negative) == outside, bound
            if contribution == "gradient":
                assert math.isnan(found.positive_share) == outside, bound  # nothing inside: nothing to share


@pytest.mark.parametrize("order", ["upper_first", "lower_first"])
def test_a_share_exactly_at_the_target_reaches_it(order):
    ratio, mask = torch.ones(2, dtype=torch.float64), torch.ones(2)
    at_share = ClipConfig(positive_contribution_target=0.25, order=order)
    found = find_clip_bounds(ratio, torch.tensor([1.0, -3.0]), mask, at_share)
    assert found.reached and (float(found.lower), float(found.upper)) == (0.6, 1.2)
    above = replace(at_share, positive_contribution_target=math.nextafter(0.25, 1))
    assert not find_clip_bounds(ratio, torch.tensor([1.0, -3.0]), mask, above).reached

    at_ratio = ClipConfig(positive_contribution_target=3 / (1 + 1e-8), target_kind="ratio", order=order)
    found = find_clip_bounds(ratio, torch.tensor([3.0, -1.0]), mask, at_ratio)
    assert found.reached and (float(found.lower), float(found.upper)) == (0.6, 1.2)
    above = replace(at_ratio, positive_contribution_target=3.0)  # the 1e-8 under the fraction is the recipe's
    assert not find_clip_bounds(ratio, torch.tensor([3.0, -1.0]), mask, above).reached


@pytest.mark.parametrize("target_kind", ["share", "ratio"])
def test_equal_sides_are_no_reason_to_stay_at_the_start(target_kind):
    config = ClipConfig(positive_contribution_target=0.999, target_kind=target_kind, contribution="gradient")
    # 1 inside and 1 outside on either side; P and N are equal to the bit.
    ratio, advantages = torch.tensor([[1.0, 2.0, 0.5, 0.625], [1.0, 1.0, -9.0, -1.6]], dtype=torch.float64)
    found = find_clip_bounds(ratio, advantages, torch.ones(4), config)
    assert float(found.initial_share) == 0.5
    # P / N is 1 at the start, which is enough; for the share the last negative token must go.
    at = (0.6, 1.2) if target_kind == "ratio" else (pytest.approx(0.64), pytest.approx(3.0))
    assert found.reached and (float(found.lower), float(found.upper)) == at


def test_of_equally_good_points_the_first_on_the_path_is_taken():
    # Only negatives below every lower bound matter: under "gradient" they are out at the start already.
    config = ClipConfig(contribution="gradient")
    found = find_clip_bounds(torch.tensor([1.0, 0.1]), torch.tensor([1.0, -9.0]), torch.ones(2), config)
    assert (float(found.lower), float(found.upper), float(found.clip_frac_negative)) == (0.6, 1.2, 1.0)


def test_a_tally_is_made_and_solved_without_reading_a_value_on_the_host():
    config = ClipConfig()
    for num in (3, 100_000):
        meta = torch.ones(num, device="meta")  # a meta tensor has no values to read
        found = solve_clip_bounds(tally_contributions(meta, meta, meta, config), config)
        assert all(getattr(found, field.name).shape == () for field in fields(ClipBounds))


@pytest.mark.parametrize("name", ["lower", "upper", "positive_share", "initial_share", "clip_frac_positive"])
def test_results_are_float64_scalars_without_a_gradient(name):
    ratio = torch.rand(6, dtype=torch.float64, requires_grad=True)
    found = find_clip_bounds(ratio, torch.randn(6), torch.ones(6, dtype=torch.bool), ClipConfig())
    value = getattr(found, name)
    assert value.shape == () and value.dtype == torch.float64 and not value.requires_grad
    assert found.reached.dtype == torch.bool
    tally = tally_contributions(ratio, torch.randn(6), torch.ones(6), ClipConfig())
    assert not tally.sums.requires_grad
    found = solve_clip_bounds(ContributionTally(tally.sums.requires_grad_()), ClipConfig())
    assert not getattr(found, name).requires_grad


def test_more_tokens_than_lanes_are_all_added_up():
    num = 1000
    ratio, advantages = torch.ones(num, dtype=torch.float64), torch.ones(num, dtype=torch.float64)
    advantages[::4] = -1.0
    tally = tally_contributions(ratio, advantages, torch.full((num,), 0.5), ClipConfig())
    assert tally.sums.sum(1).tolist() == [num / 2, num / 2, num]
    assert float(solve_clip_bounds(tally, ClipConfig()).positive_share) == 0.75


def test_grid_points_come_from_the_integer_so_that_rounding_does_not_pile_up():
    assert ClipConfig().lower_grid() == [0.6 + k * 0.02 for k in range(16)]
    assert ClipConfig().upper_grid() == [1.2 + k * 0.05 for k in range(37)]
    assert ClipConfig(ratio_upper_max=2.02).upper_grid()[-1] == 1.2 + 16 * 0.05  # the range is no multiple of the step


FIELDS = (
    "positive_contribution_target",
    *("ratio_lower_start", "ratio_lower_max", "ratio_lower_step"),
    *("ratio_upper_start", "ratio_upper_max", "ratio_upper_step"),
    *("contribution", "order", "target_kind"),
    *("smoothing", "scope", "dual_clip"),
)
PUBLISHED = {
    "readme": (0.5, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05, "surrogate", "upper_first", "share", None, "update", None),
    "paper": (0.4, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05, "surrogate", "upper_first", "share", None, "update", None),
    "octothinker": (0.45, 0.8, 0.9, 0.02, 1.2, 2.0, 0.05, "surrogate", "upper_first", "share", None, "update", None),
    "released": (1.0, 0.6, 0.8, 0.05, 1.2, 2.0, 0.05, "surrogate", "lower_first", "ratio", None, "micro_batch", 3.0),
}
OURS = {
    "steady": (
        *(0.5, 0.6, 0.9, 0.02, 1.2, 3.0, 0.05, "gradient", "upper_first", "share"),
        *((20.0, "bounds", None), "update", 3.0),
    )
}


def test_presets_hold_the_published_settings_in_every_field():
    assert {name: astuple(ClipConfig.preset(name)) for name in PRESETS} == PUBLISHED | OURS
    assert tuple(field.name for field in fields(ClipConfig)) == FIELDS
    assert ClipConfig() == ClipConfig.preset(DEFAULT_PRESET) == ClipConfig.preset("paper")
    with pytest.raises(ValueError, match=r"nonesuch.*readme, paper, octothinker, released, steady"):
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
        (dict(target_kind="sum"), "target_kind 'sum' .*share"),
        (dict(positive_contribution_target=0.0, target_kind="ratio"), "positive_contribution_target 0.0 .*above 0"),
        (dict(ratio_upper_max=math.inf), "ratio_upper_max inf .*finite"),
        (dict(ratio_lower_start=-0.5), "ratio_lower_start -0.5 .*0 < ratio_lower_start"),
        (dict(ratio_lower_step=2.998e-4), "ratio_lower_step 0.0002998 .*at least 0.0003"),
        (dict(ratio_upper_step=1.7985e-3), "ratio_upper_step 0.0017985 .*at least 0.0018"),
        (dict(ratio_lower_max=0.6, ratio_lower_step=0.0), "ratio_lower_step 0.0 .*above 0"),
        (dict(ratio_upper_max=1.2, ratio_upper_step=-0.1), "ratio_upper_step -0.1 .*above 0"),
        (dict(scope="micro_batch", smoothing=SmoothingConfig(2.0)), "scope 'micro_batch' .*with smoothing"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_field_value_and_range(settings, message):
    with pytest.raises(ValueError, match=message):
        ClipConfig(**settings)


def test_settings_at_the_edge_of_what_is_allowed_are_taken():
    for settings in (
        dict(ratio_lower_start=1.0, ratio_lower_max=1.0, ratio_upper_start=1.0, ratio_upper_max=1.0),
        dict(positive_contribution_target=1.0, target_kind="ratio"),
        dict(ratio_lower_start=1e-9),
        dict(ratio_lower_start=0.5, ratio_lower_max=1.0, ratio_lower_step=0.5 / 1000),
        dict(ratio_upper_start=1.0, ratio_upper_max=2.0, ratio_upper_step=1 / 1000),
        dict(smoothing=SmoothingConfig(2.0, start=(0.6, ClipConfig().upper_grid()[-1]))),
    ):
        config = ClipConfig(**settings)
        assert len(config.path()) == len(config.lower_grid()) + len(config.upper_grid()) - 1


def test_a_path_raises_one_bound_to_its_maximum_before_it_touches_the_other():
    settings = dict(ratio_lower_max=0.7, ratio_lower_step=0.05, ratio_upper_max=1.3)
    upper_first = [(0, 0), (0, 1), (0, 2), (1, 2), (2, 2)]
    lower_first = [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert ClipConfig(**settings).path() == upper_first
    assert ClipConfig(**settings, order="lower_first").path() == lower_first


def bounds_of_a_rank(rank: int, num_ranks: int, port: int, token_list) -> list[float]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    mine = as_tensors(token_list[rank::num_ranks])
    return numbers(find_clip_bounds(*mine, GRADIENT, group=dist.group.WORLD))


GRADIENT = ClipConfig(contribution="gradient")


def numbers(found: ClipBounds) -> list[float]:
    return [float(value) for value in astuple(found)]


def test_every_rank_of_a_group_finds_the_bounds_of_all_its_tokens(tmp_path):
    # Rank 0 has the positive tokens: alone it would stay at the start, and rank 1 end in the far corner.
    token_list = [pair for r in (0.5, 0.7, 0.95, 1.1, 1.25, 1.9) for pair in ((r, 1.0, 1.0), (1 / r, -1.1, 1.0))]
    together = numbers(find_clip_bounds(*as_tensors(token_list), GRADIENT))
    assert together[:2] not in ([0.6, 1.2], [GRADIENT.lower_grid()[-1], GRADIENT.upper_grid()[-1]])
    for found in pipeline.run_in_ranks(tmp_path, bounds_of_a_rank, 2, token_list):
        assert found == pytest.approx(together)
