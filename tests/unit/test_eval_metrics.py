"""Metrics of an evaluation, compared with enumerations of all cases."""

import math
from itertools import combinations, pairwise
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_bapo.math_tasks.metrics import (
    GradedResponse,
    bootstrap_means,
    evaluation_metrics,
    majority,
    pass_at,
)

rewards_of_a_problem = st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=8)
answers = st.sampled_from([None, "1", "2", "3"])
problems = st.lists(
    st.lists(st.tuples(st.sampled_from([None, 0.0, 1.0]), answers), min_size=4, max_size=4), min_size=1, max_size=6
)


def responses(rewards_and_answers) -> list[GradedResponse]:
    return [GradedResponse(reward, answer, truncated=False, num_tokens=1) for reward, answer in rewards_and_answers]


@given(rewards_of_a_problem, st.data())
def test_pass_at_k_is_the_mean_best_reward_over_all_subsets_of_k(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    best = fmean(max(subset) for subset in combinations(rewards, k))
    assert pass_at(torch.tensor([rewards]), k).item() == pytest.approx(best, abs=1e-9)


@given(st.integers(1, 2000), st.data())
def test_pass_at_k_of_right_and_wrong_is_the_unbiased_estimate_without_overflow(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    rewards = torch.tensor([[1.0] * c + [0.0] * (n - c)])
    expected = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at(rewards, k).item() == pytest.approx(expected, abs=1e-9)


@given(rewards_of_a_problem)
def test_pass_at_k_goes_from_the_mean_to_the_maximum_and_never_falls(rewards):
    by_k = [pass_at(torch.tensor([rewards]), k).item() for k in range(1, len(rewards) + 1)]
    assert by_k[0] == pytest.approx(fmean(rewards), abs=1e-6) and by_k[-1] == pytest.approx(max(rewards))
    assert all(low <= high + 1e-9 for low, high in pairwise(by_k))


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), answers), min_size=1, max_size=8))
def test_majority_is_the_mean_reward_of_the_answers_with_the_most_votes(votes):
    given_answers = [answer for _, answer in votes if answer is not None]
    expected = 0.0
    if given_answers:
        counts = {answer: given_answers.count(answer) for answer in given_answers}
        tied = [answer for answer in counts if counts[answer] == max(counts.values())]
        expected = fmean(fmean(reward for reward, answer in votes if answer == one) for one in tied)
    assert majority(responses(votes)) == pytest.approx(expected)


def test_an_ungraded_response_counts_as_0():
    some = responses([(1.0, "1"), (None, "1"), (None, None), (1.0, "2")])
    assert evaluation_metrics({"sums": [some]}, [4], seed=0)["sums"]["avg@4"].mean == 0.5
    assert majority(some) == 0.5


@settings(max_examples=30)
@given(problems, problems)
def test_every_mean_is_over_problems_and_lies_in_its_interval(first, second):
    datasets = {"first": [responses(one) for one in first], "second": [responses(one) for one in second]}
    metrics = evaluation_metrics(datasets, [1, 2], seed=0)
    for name, rows in (("first", first), ("second", second)):
        accuracy = fmean(fmean(reward or 0.0 for reward, _ in row) for row in rows)
        assert metrics[name]["avg@4"].mean == pytest.approx(accuracy)
        assert metrics[name]["pass@1"].mean == pytest.approx(accuracy)
        has_votes = any(answer is not None for row in rows for _, answer in row)
        assert {metric for metric, found in metrics[name].items() if found is None} == (
            set() if has_votes else {"majority@4"}
        )
        if has_votes:
            votes = fmean(majority(responses(row)) for row in rows)
            assert metrics[name]["majority@4"].mean == pytest.approx(votes)
    for name, macro in metrics["macro average"].items():
        of_datasets = [metrics["first"][name], metrics["second"][name]]
        assert (macro is None) == (None in of_datasets)
        if macro is not None:
            assert macro.mean == pytest.approx(fmean(estimate.mean for estimate in of_datasets))
    found = [estimate for metrics_of in metrics.values() for estimate in metrics_of.values() if estimate is not None]
    assert all(one.low - 1e-9 <= one.mean <= one.high + 1e-9 for one in found)


def test_majority_is_unknown_where_no_response_has_an_answer():
    metrics = evaluation_metrics({"mute": [responses([(1.0, None)])], "sums": [responses([(1.0, "1")])]}, [1], seed=0)
    assert metrics["mute"]["majority@1"] is None and metrics["macro average"]["majority@1"] is None
    assert metrics["sums"]["majority@1"].mean == 1


graded_problems = st.lists(
    st.lists(
        st.builds(
            GradedResponse,
            reward=st.sampled_from([None, 0.0, 0.25, 1.0]),
            answer=answers,
            truncated=st.booleans(),
            num_tokens=st.integers(1, 100),
        ),
        min_size=2,
        max_size=2,
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=30)
@given(graded_problems)
def test_truncated_is_a_fraction_of_the_responses_and_length_their_mean_in_tokens(problems):
    estimates = evaluation_metrics({"some": problems}, [1], seed=0)["some"]
    each = [response for responses in problems for response in responses]
    assert estimates["truncated"].mean == pytest.approx(sum(one.truncated for one in each) / len(each))
    assert estimates["length"].mean == pytest.approx(sum(one.num_tokens for one in each) / len(each))


def of_rewards(rewards) -> list[list[GradedResponse]]:
    """Return problems with one response each."""
    return [[GradedResponse(reward, None, truncated=False, num_tokens=1)] for reward in rewards]


@settings(max_examples=20)
@given(st.lists(st.lists(st.floats(0, 1, width=16), min_size=1, max_size=9), min_size=1, max_size=3), st.integers(0, 9))
def test_an_interval_excludes_a_fortieth_of_the_bootstrap_means_at_each_end(datasets, seed):
    metrics = evaluation_metrics({str(i): of_rewards(one) for i, one in enumerate(datasets)}, [], seed)
    generator = torch.Generator().manual_seed(seed)
    resampled = [bootstrap_means(torch.tensor(one).double()[:, None], generator) for one in datasets]
    resampled.append(torch.stack(resampled).mean(0))  # the macro average
    for means, estimates in zip(resampled, metrics.values(), strict=True):
        estimate = estimates["avg@1"]
        for bound, level in ((estimate.low, 0.025), (estimate.high, 0.975)):
            below, up_to = ((means < bound - 1e-12).double().mean(), (means <= bound + 1e-12).double().mean())
            assert below - 1e-3 <= level <= up_to + 1e-3


@pytest.mark.parametrize("num_problems, num_right", [(40, 20), (400, 120), (1000, 900)])
def test_the_interval_of_right_and_wrong_is_that_of_the_binomial_distribution(num_problems, num_right):
    problems = of_rewards([1.0] * num_right + [0.0] * (num_problems - num_right))
    estimate = evaluation_metrics({"some": problems}, [], seed=0)["some"]["avg@1"]
    p = num_right / num_problems
    at_most, total = [], 0.0  # P(at most i right) in a bootstrap sample
    for i in range(num_problems + 1):
        total += math.comb(num_problems, i) * p**i * (1 - p) ** (num_problems - i)
        at_most.append(total)
    # With 10,000 resamples a quantile's level has a standard deviation of 0.0016. The levels of 90% and 99% intervals,
    # 0.05 and 0.005, are outside of the tolerance.
    for bound, level in ((estimate.low, 0.025), (estimate.high, 0.975)):
        first, last = (sum(one < level + shift for one in at_most) for shift in (-0.008, 0.008))
        assert first <= round(bound * num_problems) <= last
        assert at_most[-1] == pytest.approx(1)


def test_bootstrap_means_resample_whole_problems():
    values = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    means = bootstrap_means(values, torch.Generator().manual_seed(0), num_resamples=5000)
    assert means.shape == (5000, 2)
    torch.testing.assert_close(means.sum(1), torch.ones(5000, dtype=torch.float64))  # the same problems in both columns
    assert means[:, 0].unique().numel() == 4
    assert means[:, 0].mean().item() == pytest.approx(2 / 3, abs=0.02)
