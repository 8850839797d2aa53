"""The quickstart's reward, an ordinary OpenRLHF reward-function file: reasoning-gym's own score of the answer."""

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
        labels: each prompt's reasoning-gym entry, as JSON.

    Returns:
        `rewards` and `scores`, float [len(queries)]: 1 for a right answer, else 0. The partial credit that
        reasoning-gym gives to 195 for 95 is left out, so that the mean is an accuracy.
    """
    answers = [query[len(prompt) :].removesuffix(EOS) for query, prompt in zip(queries, prompts, strict=True)]
    scores = [SCORER.score_answer(a, entry=json.loads(label)) for a, label in zip(answers, labels, strict=True)]
    rewards = (torch.tensor(scores) == 1).float()
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
