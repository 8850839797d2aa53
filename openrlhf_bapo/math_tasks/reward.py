"""The math grader as an OpenRLHF reward function: 1 for a right final answer, 0 for any other."""

import os

import torch

from openrlhf_bapo.math_tasks.answers import response_from_query
from openrlhf_bapo.math_tasks.grader import MathGrader, failure_logs

# One per process, shared by all of OpenRLHF's threads. Workers start with the first answer that needs one.
GRADER = MathGrader(num_workers=min(4, os.cpu_count() or 1), time_limit=5.0)


def reward_func(queries: list[str], prompts: list[str], labels: list, **kwargs: object) -> dict:
    """Grade each response against its label; called by OpenRLHF's SingleTurnAgentExecutor (utils/agent.py).

    Args:
        queries: prompt and response as text, special tokens included.
        prompts: the prompts alone.
        labels: the gold answers, as text or numbers.

    Returns:
        `rewards` and `scores`, float [len(queries)], and `extra_logs`: which responses count as wrong because grading
        them took too long or ended a worker. OpenRLHF logs their means over the samples.

    Raises:
        TypeError: if a label is not text and not a number, or is empty, as without --data.label_key.
    """
    if odd := [label for label in labels if not isinstance(label, str | int | float) or not str(label).strip()]:
        raise TypeError(f"the label is {odd[0]!r}; allowed: text or a number (--data.label_key)")
    responses = [response_from_query(query, prompt) for query, prompt in zip(queries, prompts, strict=True)]
    grades = GRADER.grade(responses, [str(label) for label in labels])
    rewards = torch.tensor([float(grade.is_correct) for grade in grades])
    extra_logs = {name: torch.tensor(values) for name, values in failure_logs(grades).items()}
    return {"rewards": rewards, "scores": rewards, "extra_logs": extra_logs}
