"""The quickstart's reward, an ordinary OpenRLHF reward-function file: reasoning-gym's own score of the answer.

The answer is the whole response, or what stands after its last "=" where the problem is to be worked out.
"""

import json

import torch
from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

SCORER = ChainSumDataset(ChainSumConfig())
EOS = "<eos>"


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs) -> dict:
    """Score each response.

    Args:
        queries: prompt and response as text, special tokens included.
        prompts: the prompts alone.
        labels: each prompt's entry from `prepare.py`, as JSON.

    Returns:
        `rewards` and `scores`, float [len(queries)]: 1 for a right answer, else 0. The partial credit that
        reasoning-gym gives to 195 for 95 is left out, so that the mean is an accuracy.
    """
    answers = [query[len(prompt) :].removesuffix(EOS) for query, prompt in zip(queries, prompts, strict=True)]
    entries = [json.loads(label) for label in labels]
    answers = [
        answer.rpartition("=")[2] if "is_worked_out" in entry["metadata"] else answer
        for answer, entry in zip(answers, entries, strict=True)
    ]
    scores = [SCORER.score_answer(a, entry=entry) for a, entry in zip(answers, entries, strict=True)]
    rewards = (torch.tensor(scores) == 1).float()
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
