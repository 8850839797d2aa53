"""The clip-bound search: properties first, against Algorithm 1 as a plain loop."""

import math
from dataclasses import replace

import pipeline
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given
from reference import near_a_decision, search
from strategies import as_tensors, clip_configs, tokens

from openrlhf_bapo import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    find_clip_bounds,
    solve_clip_bounds,
    tally_contributions,
)
from openrlhf_bapo.rules.clip_config import DEFAULT_PRESET, PRESETS, SmoothingConfig


def assert_same(found: ClipBounds, expected: ClipBounds, rel: float) -> None:
    """Bounds and `reached` must agree exactly, shares and fractions within `rel`."""
    for name, value in vars(found).items():
        within = 0 if name in ("lower", "upper", "reached") else rel
        assert float(value) == pytest.approx(float(getattr(expected, name)), rel=within, abs=0, nan_ok=True), name


GRADIENT = ClipConfig(contribution="gradient")
# (ratio, advantage, weight), on both sides of every bound of ClipConfig().
OUTSIDE = [(0.2, -2.0, 0.25), (0.4, -1.0, 1.0), (0.95, -0.6, 1.0), (1.1, 0.7, 0.5), (2.52, 1.0, 1.0), (3.5, 0.3, 1.0)]
EQUAL_SIDES = [(1.0, 1.25, 1.0), (2.01, 1.0, 1.0), (1.0, -0.25, 1.0), (0.625, -1.6, 1.0)]  # at the start, to the bit


@given(tokens(), clip_configs())
@example(OUTSIDE, ClipConfig(positive_contribution_target=0.99))
@example(OUTSIDE, replace(GRADIENT, positive_contribution_target=0.99))
@example(EQUAL_SIDES, replace(GRADIENT, positive_contribution_target=0.9))
@example(EQUAL_SIDES, replace(GRADIENT, positive_contribution_target=0.9, target_kind="ratio"))  # met at the start
@example([(1.0, 0.95, 1.0), (1.0, -1.0, 1.0)], ClipConfig.preset("released"))  # P / N of 0.95 is not met
@example([(1.0, 0.0, 1.0), (2.0, 1.0, 0.0)], ClipConfig())  # nothing to balance
@example([(1.5, 1.0, 1.0)], GRADIENT)  # nothing has a gradient at the start
@example([(0.7, -1.0, 1.0)], GRADIENT)  # far corner; its bounds have no piled up rounding
@example([(1.0, -1.0, 1.0)], ClipConfig(ratio_upper_max=2.02))  # no multiple of the step
@example([(1.0, -1.0, 1.0)], ClipConfig(0.4, 0.05, 1.0, 0.010000000000000002))  # rounding could pass 1
def test_agrees_with_a_plain_loop_over_the_path(token_list, config):
    signs = {advantage > 0 for _, advantage, weight in token_list if advantage * weight}
    assume(len(signs) < 2 or not near_a_decision(token_list, config, 1e-9))  # of one sign, shares are exact
    assert_same(find_clip_bounds(*as_tensors(token_list), config), ClipBounds(**search(token_list, config)), 1e-9)


def test_more_tokens_than_lanes_are_all_added_up():
    num = 1000
    ratio, advantages = torch.ones(num, dtype=torch.float64), torch.ones(num, dtype=torch.float64)
    advantages[::4] = -1.0
    tally = tally_contributions(ratio, advantages, torch.full((num,), 0.5), ClipConfig())
    assert tally.sums.sum(1).tolist() == [num / 2, num / 2, num]
    assert float(solve_clip_bounds(tally, ClipConfig()).positive_share) == 0.75


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
@pytest.mark.parametrize(
    ("advantages", "target_kind", "exact", "above"),
    [
        ([1.0, -3.0], "share", 0.25, math.nextafter(0.25, 1)),
        ([3.0, -1.0], "ratio", 3 / (1 + 1e-8), 3.0),  # the 1e-8 under the fraction is the recipe's
    ],
)
def test_a_share_exactly_at_the_target_reaches_it(order, advantages, target_kind, exact, above):
    for target in (exact, above):
        config = ClipConfig(positive_contribution_target=target, target_kind=target_kind, order=order)
        found = find_clip_bounds(torch.ones(2, dtype=torch.float64), torch.tensor(advantages), torch.ones(2), config)
        assert bool(found.reached) == (target == exact) == ((float(found.lower), float(found.upper)) == (0.6, 1.2))


def test_results_are_float64_scalars_without_a_gradient():
    ratio = torch.rand(6, dtype=torch.float64, requires_grad=True)
    tally = tally_contributions(ratio, torch.randn(6), torch.ones(6, dtype=torch.bool), ClipConfig())
    assert not tally.sums.requires_grad
    found = solve_clip_bounds(ContributionTally(tally.sums.requires_grad_()), ClipConfig())
    for name, value in vars(found).items():
        assert value.shape == () and not value.requires_grad
        assert value.dtype == (torch.bool if name == "reached" else torch.float64)


PAPER = dict(
    positive_contribution_target=0.4,
    **dict(ratio_lower_start=0.6, ratio_lower_max=0.9, ratio_lower_step=0.02),
    **dict(ratio_upper_start=1.2, ratio_upper_max=3.0, ratio_upper_step=0.05),
    **dict(contribution="surrogate", order="upper_first", target_kind="share"),
    **dict(smoothing=None, scope="update", dual_clip=None),
)
PUBLISHED = {
    "readme": dict(positive_contribution_target=0.5),
    "paper": {},
    "octothinker": dict(positive_contribution_target=0.45, ratio_lower_start=0.8, ratio_upper_max=2.0),
    "released": dict(positive_contribution_target=1.0, ratio_lower_max=0.8, ratio_lower_step=0.05, ratio_upper_max=2.0)
    | dict(order="lower_first", target_kind="ratio", scope="micro_batch", dual_clip=3.0),
}
OURS = dict(positive_contribution_target=0.5, contribution="gradient", smoothing=SmoothingConfig(20.0), dual_clip=3.0)


def test_presets_hold_the_published_settings_in_every_field():
    expected = {name: PAPER | settings for name, settings in (PUBLISHED | {"steady": OURS}).items()}
    assert {name: vars(ClipConfig.preset(name)) for name in PRESETS} == expected
    assert vars(SmoothingConfig(20.0)) == dict(half_life=20.0, of="bounds", start=None)
    assert ClipConfig() == ClipConfig.preset(DEFAULT_PRESET) == ClipConfig.preset("paper")
    with pytest.raises(ValueError, match=r"nonesuch.*readme, paper, octothinker, released, steady"):
        ClipConfig.preset("nonesuch")


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
        (dict(contribution="sum"), "contribution 'sum' .*surrogate"),
        (dict(order="both"), "order 'both' .*upper_first"),
        (dict(target_kind="sum"), "target_kind 'sum' .*share"),
        (dict(positive_contribution_target=0.0, target_kind="ratio"), "positive_contribution_target 0.0 .*above 0"),
        (dict(ratio_upper_max=math.inf), "ratio_upper_max inf .*finite"),
        (dict(ratio_lower_start=-0.5), "ratio_lower_start -0.5 .*0 < ratio_lower_start"),
        (dict(ratio_lower_step=2.998e-4), "ratio_lower_step 0.0002998 .*at least 0.0003"),
        (dict(ratio_upper_step=1.7985e-3), "ratio_upper_step 0.0017985 .*at least 0.0018"),
        (dict(ratio_lower_max=0.6, ratio_lower_step=0.0), "ratio_lower_step 0.0 .*above 0"),
        (dict(dual_clip=1.0), "dual_clip 1.0 .*above 1"),
        (dict(dual_clip=math.nan), "dual_clip nan .*finite"),
        (dict(scope="micro_batch", smoothing=SmoothingConfig(2.0)), "scope 'micro_batch' .*with smoothing"),
        # As YAML may have them.
        (dict(ratio_upper_max="3"), "ratio_upper_max '3' .*a finite number"),
        (dict(ratio_lower_max=True), "ratio_lower_max True .*a finite number"),
        (dict(ratio_lower_step=None), "ratio_lower_step None .*a finite number"),
        (dict(dual_clip="3"), "dual_clip '3' .*None, or a number above 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_field_value_and_range(settings, message):
    with pytest.raises(ValueError, match=message):
        ClipConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(half_life="20"), "half_life '20' .*a number above 0"),
        (dict(half_life=True), "half_life True .*a number above 0"),
        (dict(start=[0.7]), r"start \[0.7\] .*two numbers, \(lower, upper\)"),
        (dict(start=0.7), "start 0.7 .*two numbers"),
        (dict(start=["0.7", "1.3"]), r"start \['0.7', '1.3'\] .*two numbers"),
    ],
)
def test_smoothing_that_cannot_be_is_refused_with_field_value_and_range(settings, message):
    with pytest.raises(ValueError, match=message):
        SmoothingConfig(**dict(half_life=2.0) | settings)


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


def bounds_of_a_rank(rank: int, num_ranks: int, port: int, token_list) -> ClipBounds:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    return find_clip_bounds(*as_tensors(token_list[rank::num_ranks]), GRADIENT, group=dist.group.WORLD)


def test_every_rank_of_a_group_finds_the_bounds_of_all_its_tokens(tmp_path):
    # Rank 0 has the positive tokens: alone it would stay at the start, and rank 1 end in the far corner.
    token_list = [pair for r in (0.5, 0.7, 0.95, 1.1, 1.25, 1.9) for pair in ((r, 1.0, 1.0), (1 / r, -1.1, 1.0))]
    together = find_clip_bounds(*as_tensors(token_list), GRADIENT)
    assert float(together.upper) != 1.2 and float(together.lower) != GRADIENT.lower_grid()[-1]
    for found in pipeline.run_in_ranks(tmp_path, bounds_of_a_rank, 2, token_list):
        assert_same(found, together, rel=1e-9)
