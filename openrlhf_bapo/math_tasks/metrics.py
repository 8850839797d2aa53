"""Metrics of an evaluation with n graded responses per problem, with bootstrap intervals over the problems.

A problem's metrics come from its n responses. A dataset's metrics are unweighted means over its problems. The n
responses to one problem share its difficulty, so the bootstrap resamples whole problems. The interval says how far the
mean would move with other problems of the same kind; if all problems give equal values, it has no width.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
MACRO_AVERAGE = "macro average"

# Counts of resampled problems held at once: 32 MiB in float64.
_COUNTS_AT_ONCE = 2**22


@dataclass(frozen=True)
class GradedResponse:
    """The inputs of the metrics for one response."""

    reward: float | None
    """The reward function's value. None: it failed, and the ungraded response counts as 0."""

    answer: str | None
    """The final answer extracted from the text, which is its vote in majority@n. None: no answer, no vote."""

    truncated: bool
    """Whether the maximum length ended the response, not the model."""

    num_tokens: int
    """Response length in tokens, without the prompt."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its bootstrap interval."""

    mean: float
    low: float
    high: float


def pass_at(rewards: torch.Tensor, k: int) -> torch.Tensor:
    """Return pass@k of every problem: the expected best reward of k of its n responses, drawn without replacement.

    If c of n rewards are 1 and the others 0, this is the unbiased estimate 1 - C(n-c, k) / C(n, k) of Chen et al. 2021
    (arXiv 2107.03374). For any rewards, k = 1 gives the mean and k = n the maximum, like OpenRLHF's `pass1` and
    `passN` (`compute_eval_metrics` in trainer/ppo_trainer.py).

    Args:
        rewards: [num_problems, n].
        k: from 1 to n.

    Returns:
        [num_problems], float64.
    """
    n = rewards.shape[1]
    # The i-th lowest reward (from 0) is the best of C(i, k-1) of the C(n, k) subsets. Ratios of exact integers.
    weights = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
    return rewards.double().sort(dim=1).values @ torch.tensor(weights, dtype=torch.float64)


def majority(responses: list[GradedResponse]) -> float:
    """Return majority@n of one problem: the reward of its most frequent answer, 0 if no response has an answer.

    An answer's reward is the mean over the responses that give it. If several answers are equally frequent, the result
    is the mean over them.
    """
    rewards_by_answer = defaultdict(list)
    for response in responses:
        if response.answer is not None:
            rewards_by_answer[response.answer].append(response.reward or 0.0)
    if not rewards_by_answer:
        return 0.0
    most = max(map(len, rewards_by_answer.values()))
    return fmean(fmean(rewards) for rewards in rewards_by_answer.values() if len(rewards) == most)


def bootstrap_means(
    values: torch.Tensor, generator: torch.Generator, num_resamples: int = NUM_RESAMPLES
) -> torch.Tensor:
    """Return bootstrap means: each over as many problems as there are, drawn with replacement.

    Args:
        values: [num_problems, num_metrics], float64; a resample takes the same problems for all metrics.
        generator: source of the draws.
        num_resamples: number of bootstrap means.

    Returns:
        [num_resamples, num_metrics], float64.
    """
    num_problems = len(values)
    means = []
    for part in torch.arange(num_resamples).split(max(1, _COUNTS_AT_ONCE // num_problems)):
        drawn = torch.randint(num_problems, (len(part), num_problems), generator=generator)
        counts = torch.zeros(drawn.shape, dtype=torch.float64)
        counts.scatter_add_(1, drawn, torch.ones_like(counts))
        means.append(counts @ values / num_problems)
    return torch.cat(means)


def evaluation_metrics(
    datasets: dict[str, list[list[GradedResponse]]], pass_at_k: list[int], seed: int
) -> dict[str, dict[str, Estimate | None]]:
    """Return every metric of every dataset, and under `MACRO_AVERAGE` the unweighted mean over the datasets.

    Args:
        datasets: by name, the n responses of each problem.
        pass_at_k: the k of pass@k, each from 1 to n.
        seed: seed of the bootstrap.

    Returns:
        By dataset, then by metric: "avg@n" (mean reward, which is the accuracy if rewards are 0 and 1), "pass@k" for
        each k, "majority@n", "truncated" (fraction of the responses), "length" (mean, in tokens). majority@n is None if
        no response of the dataset has an answer; then its macro average is None too.
    """
    generator = torch.Generator().manual_seed(seed)
    metrics, all_means, all_resampled, unknown = {}, [], [], set()
    for dataset, problems in datasets.items():
        per_problem = _per_problem(problems, pass_at_k)
        values = torch.stack(list(per_problem.values()), dim=1)
        means, resampled = values.mean(0), bootstrap_means(values, generator)
        voteless = all(response.answer is None for responses in problems for response in responses)
        without = {name for name in per_problem if voteless and name.startswith("majority")}
        metrics[dataset] = _estimates(list(per_problem), means, resampled, without)
        all_means.append(means)
        all_resampled.append(resampled)
        unknown |= without
    names = list(next(iter(metrics.values())))
    # Datasets are resampled independently, so the mean of their bootstrap means is a bootstrap mean of the average.
    means, resampled = torch.stack(all_means).mean(0), torch.stack(all_resampled).mean(0)
    return metrics | {MACRO_AVERAGE: _estimates(names, means, resampled, unknown)}


def _per_problem(problems: list[list[GradedResponse]], pass_at_k: list[int]) -> dict[str, torch.Tensor]:
    """Return every metric of every problem, [num_problems] each, in the order of display."""
    n = len(problems[0])

    def table(value: Callable[[GradedResponse], float]) -> torch.Tensor:
        return torch.tensor([[value(response) for response in responses] for responses in problems]).double()

    rewards = table(lambda response: response.reward or 0.0)
    return {
        f"avg@{n}": rewards.mean(1),
        **{f"pass@{k}": pass_at(rewards, k) for k in pass_at_k},
        f"majority@{n}": torch.tensor([majority(responses) for responses in problems], dtype=torch.float64),
        "truncated": table(lambda response: response.truncated).mean(1),
        "length": table(lambda response: response.num_tokens).mean(1),
    }


def _estimates(
    names: list[str], means: torch.Tensor, resampled: torch.Tensor, unknown: set[str]
) -> dict[str, Estimate | None]:
    tail = (1 - CONFIDENCE) / 2
    bounds = resampled.quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64), dim=0)
    return {
        name: None if name in unknown else Estimate(mean, low, high)
        for name, mean, low, high in zip(names, means.tolist(), *bounds.tolist(), strict=True)
    }
