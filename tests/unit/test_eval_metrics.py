"""Metrics of an evaluation, compared with enumerations of all cases."""

import math
from itertools import combinations
from statistics import fmean

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_bapo.math_tasks.metrics import GradedResponse, bootstrap_means, evaluation_metrics, majority, pass_at

rewards_of_a_problem = st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=8)
answers = st.sampled_from([None, "1", "2", "3"])
graded_responses = st.builds(
    GradedResponse,
    reward=st.sampled_from([None, 0.0, 0.25, 1.0]),
    answer=answers,
    truncated=st.booleans(),
    num_tokens=st.integers(1, 100),
)
problems = st.lists(st.lists(graded_responses, min_size=4, max_size=4), min_size=1, max_size=6)


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


@given(st.lists(graded_responses, min_size=1, max_size=8))
def test_majority_is_the_mean_reward_of_the_answers_with_the_most_votes(votes):
    given_answers = [vote.answer for vote in votes if vote.answer is not None]
    if not given_answers:
        assert majority(votes) == 0
        return
    counts = {answer: given_answers.count(answer) for answer in given_answers}
    tied = [answer for answer in counts if counts[answer] == max(counts.values())]
    expected = fmean(fmean(vote.reward or 0.0 for vote in votes if vote.answer == one) for one in tied)
    assert majority(votes) == pytest.approx(expected)


@settings(max_examples=30)
@given(problems, problems)
def test_every_mean_is_over_problems_and_lies_in_its_interval(first, second):
    datasets = {"first": first, "second": second}
    metrics = evaluation_metrics(datasets, [1, 2], seed=0)
    for name, rows in datasets.items():
        accuracy = fmean(fmean(one.reward or 0.0 for one in row) for row in rows)
        expected = {"avg@4": accuracy, "pass@1": accuracy}
        expected["pass@2"] = fmean(fmean(map(max, combinations([r.reward or 0.0 for r in row], 2))) for row in rows)
        expected["truncated"] = fmean(one.truncated for row in rows for one in row)
        expected["length"] = fmean(one.num_tokens for row in rows for one in row)
        has_votes = any(one.answer is not None for row in rows for one in row)
        expected["majority@4"] = fmean(map(majority, rows)) if has_votes else None
        means = {metric: estimate and estimate.mean for metric, estimate in metrics[name].items()}
        assert means == pytest.approx(expected)
    for name, macro in metrics["macro average"].items():
        of_datasets = [metrics["first"][name], metrics["second"][name]]
        assert (macro is None) == (None in of_datasets)
        if macro is not None:
            assert macro.mean == pytest.approx(fmean(estimate.mean for estimate in of_datasets))
    found = [estimate for metrics_of in metrics.values() for estimate in metrics_of.values() if estimate is not None]
    assert all(one.low - 1e-9 <= one.mean <= one.high + 1e-9 for one in found)


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
