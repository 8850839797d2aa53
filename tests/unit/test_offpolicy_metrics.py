"""Off-policy metrics: the tally and its metrics compared with a plain loop over the tokens."""

import functools
import math
import operator
from itertools import pairwise

import pipeline
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import advantages, ratios, weights

from openrlhf_bapo.offpolicy.offpolicy_metrics import STALENESS_BUCKETS, offpolicy_metrics, tally_offpolicy

SPANS = {"0": (0, 0), "1": (1, 1), "2-3": (2, 3), "4-7": (4, 7), "8+": (8, math.inf)}
GARBAGE = (math.nan, math.inf, -math.inf, -1.0, 1e300)

lowers, uppers = st.floats(0.05, 1.0), st.floats(1.0, 4.0)


def stalenesses():
    """Staleness in versions, including every bucket's edges and a value far above the last one."""
    return st.one_of(st.sampled_from([0, 1, 2, 3, 4, 7, 8, 100]), st.integers(0, 10))


def stale_tokens():
    """Lists of (ratio, advantage, mask, staleness, optimizer steps)."""
    return st.lists(st.tuples(ratios(), advantages(), weights(), stalenesses(), st.integers(0, 1000)), max_size=40)


# Tokens in every bucket, with positive, negative and zero advantage, inside and outside of the bounds 0.8 and 1.2.
OF_EVERY_KIND = [
    (ratio, advantage, weight, age, 8 * age + 3)
    for age in (0, 1, 2, 3, 4, 7, 8, 100)
    for ratio in (0.5, 0.7, 1.0, 1.5 + age)
    for advantage in (-2.0, -0.3, -0.3, 0.0, 0.3, 2.0)
    for weight in (0.0, 0.25)
] + [(ratio, 0.0, 1.0, 0, 2) for ratio in (0.1, 9.0)] * 3  # count on neither side
# Tokens outside of the bounds get smaller advantages on average, so that counting and weighing them differ.
OF_EVERY_KIND += [(0.5, -0.5, 1.0, 0, 0), (1.5, 0.5, 1.0, 0, 0)] * 2


def as_tensors(token_list, age_dtype=torch.int64) -> list[torch.Tensor]:
    """[ratio, advantages, mask, staleness, optimizer steps], each [num_tokens]."""
    columns = [list(column) for column in zip(*token_list, strict=True)] or [[]] * 5
    kinds = [torch.float64] * 3 + [age_dtype] * 2
    return [torch.tensor(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)]


def metrics_of(token_list, lower=0.8, upper=1.2, age_dtype=torch.int64) -> dict[str, float]:
    return offpolicy_metrics(tally_offpolicy(*as_tensors(token_list, age_dtype), lower, upper))


def expected_metrics(token_list, lower, upper) -> dict[str, float]:
    """Compute `offpolicy_metrics` by its definition, token by token."""
    everything = [token for token in token_list if token[2] > 0]
    found = {}
    for suffix, (first, last) in {"": (0, math.inf), **{f"/staleness_{k}": span for k, span in SPANS.items()}}.items():
        some = [token for token in everything if first <= token[3] <= last]
        if not some:
            continue
        r = [token[0] for token in some]
        above = [ratio > upper for ratio, advantage, *_ in some if advantage > 0]
        below = [ratio < lower for ratio, advantage, *_ in some if advantage < 0]
        found[f"offpolicy/ess{suffix}"] = math.fsum(r) ** 2 / (len(r) * math.fsum(x * x for x in r))
        found[f"offpolicy/ratio_mean{suffix}"] = math.fsum(r) / len(r)
        found[f"offpolicy/ratio_max{suffix}"] = max(r)
        found[f"offpolicy/clip_frac_positive{suffix}"] = sum(above) / max(len(above), 1)
        found[f"offpolicy/clip_frac_negative{suffix}"] = sum(below) / max(len(below), 1)
        if suffix:
            found[f"offpolicy/token_frac{suffix}"] = len(some) / len(everything)
        else:
            found["offpolicy/staleness_mean"] = sum(token[3] for token in some) / len(some)
            found["offpolicy/staleness_max"] = max(token[3] for token in some)
            found["offpolicy/optimizer_steps_mean"] = sum(token[4] for token in some) / len(some)
            found["offpolicy/optimizer_steps_max"] = max(token[4] for token in some)
    return found


@given(stale_tokens(), lowers, uppers, st.booleans(), st.sampled_from([torch.int32, torch.int64]))
@example(OF_EVERY_KIND, 0.8, 1.2, True, torch.int32)
@example([(0.5, -1.0, 1.0, 0, 0), (1.5, 1.0, 1.0, 0, 0)], 0.8, 1.2, True, torch.int64)  # one of each sign
def test_agrees_with_a_plain_loop_over_the_tokens(token_list, lower, upper, bounds_are_tensors, age_dtype):
    bounds = [torch.tensor(bound, dtype=torch.float64) if bounds_are_tensors else bound for bound in (lower, upper)]
    found = metrics_of(token_list, *bounds, age_dtype)
    assert found == pytest.approx(expected_metrics(token_list, lower, upper), rel=1e-9)


@given(stale_tokens(), st.lists(st.integers(0, 40), max_size=4), st.randoms())
def test_split_into_tallies_and_order_do_not_matter(token_list, cuts, random):
    whole = metrics_of(token_list)
    random.shuffle(token_list)
    edges = [0, *sorted(min(cut, len(token_list)) for cut in cuts), len(token_list)]
    parts = [tally_offpolicy(*as_tensors(token_list[a:b]), 0.8, 1.2) for a, b in pairwise(edges)]
    assert offpolicy_metrics(functools.reduce(operator.add, parts)) == pytest.approx(whole, rel=1e-9)


@given(stale_tokens(), st.integers(0, 40), st.booleans(), st.booleans())
@example([(1.0, 1.0, 1.0, 8, 5)], 0, True, False)
def test_without_staleness_or_optimizer_steps_their_metrics_are_left_out(token_list, cut, staleness, steps):
    parts = []
    for some in (token_list[:cut], token_list[cut:]):
        *values, versions, optimizer_steps = as_tensors(some)
        ages = versions if staleness else None, optimizer_steps if steps else None
        parts.append(tally_offpolicy(*values, *ages, 0.8, 1.2))
    expected = {
        name: value
        for name, value in metrics_of(token_list).items()
        if (staleness or "staleness" not in name) and (steps or "steps" not in name)
    }
    assert offpolicy_metrics(parts[0] + parts[1]) == pytest.approx(expected, rel=1e-9)


@given(stale_tokens(), st.lists(st.tuples(*[st.sampled_from(GARBAGE)] * 2, *[st.integers(-(2**63), 2**63 - 1)] * 2)))
def test_padding_and_garbage_under_the_mask_do_not_matter(token_list, garbage):
    plain = metrics_of(token_list)
    padded = as_tensors(token_list + [(ratio, advantage, 0.0, *ages) for ratio, advantage, *ages in garbage])
    assert offpolicy_metrics(tally_offpolicy(*padded, 0.8, 1.2)) == pytest.approx(plain, rel=1e-12)
    two_dim = [x.repeat(2, 1) for x in padded]
    two_dim[2][1] = 0
    two_dim[2] = two_dim[2] > 0
    assert offpolicy_metrics(tally_offpolicy(*two_dim, 0.8, 1.2)) == pytest.approx(plain, rel=1e-12)


def test_the_labels_of_the_buckets_match_their_edges():
    assert {label: first for label, (first, _) in SPANS.items()} == STALENESS_BUCKETS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make_bound", [float, lambda bound: torch.tensor(bound, dtype=torch.float64)])
def test_a_ratio_on_a_bound_is_inside_it(dtype, make_bound):
    ratio = torch.tensor([1.2, 0.6], dtype=dtype)
    staleness = torch.zeros(2, dtype=torch.int64)
    tally = tally_offpolicy(
        ratio, torch.tensor([1.0, -1.0]), torch.ones(2), staleness, staleness, make_bound(0.6), make_bound(1.2)
    )
    found = offpolicy_metrics(tally)
    assert found["offpolicy/clip_frac_positive"] == found["offpolicy/clip_frac_negative"] == 0


def test_a_tally_is_made_without_reading_a_value_on_the_host():
    meta = [x.to("meta") for x in as_tensors([(1.0, 1.0, 1.0, 2, 5)])]  # a meta tensor has no values to read
    bound = torch.ones((), device="meta")
    tally = tally_offpolicy(*meta, bound, bound)
    tally += tally
    assert (tally.sums.shape, tally.maxima.shape) == ((len(STALENESS_BUCKETS), 9), (len(STALENESS_BUCKETS), 3))


def test_a_tally_of_ratios_with_a_gradient_has_no_gradient():
    ratio = torch.ones(3, requires_grad=True)
    tally = tally_offpolicy(ratio, *torch.ones(2, 3), *torch.zeros(2, 3, dtype=torch.int64), 0.8, 1.2)
    assert not tally.sums.requires_grad and not tally.maxima.requires_grad


def metrics_of_a_rank(rank: int, num_ranks: int, port: int, token_list) -> dict[str, float]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    half = len(token_list) // num_ranks
    tally = tally_offpolicy(*as_tensors(token_list[half * rank : half * (rank + 1)]), 0.8, 1.2)
    reduced = offpolicy_metrics(tally.all_reduce(dist.group.WORLD))
    assert offpolicy_metrics(tally) != reduced  # the rank's own tally stays as it is
    return reduced


def test_every_rank_of_a_group_has_the_metrics_of_all_its_tokens(tmp_path):
    for found in pipeline.run_in_ranks(tmp_path, metrics_of_a_rank, 2, OF_EVERY_KIND):
        assert found == pytest.approx(metrics_of(OF_EVERY_KIND))


def test_without_tokens_there_are_no_metrics():
    assert metrics_of([]) == metrics_of([(1.0, 1.0, 0.0, 3, 5)]) == {}


def test_ratios_that_are_all_zero_give_an_effective_sample_size_of_zero():
    assert metrics_of([(0.0, 1.0, 1.0, 2, 5)] * 3)["offpolicy/ess"] == 0
