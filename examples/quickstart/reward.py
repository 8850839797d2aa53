"""The quickstart's reward, an ordinary OpenRLHF reward-function file: reasoning-gym's score of the answer.

The answer is the whole response, or the text after its last "=" if the response works the problem out. A walk is right
if it ends on the goal and never leaves the grid.
"""

import json

import torch
from reasoning_gym.arithmetic.chain_sum import ChainSumConfig, ChainSumDataset

SCORER = ChainSumDataset(ChainSumConfig())
EOS = "<eos>"
MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}


def walk_score(moves: str, start: list[int], goal: list[int], size: int) -> float:
    """Return 1 for a walk within a grid of size x size from start to goal, (row, column) each, else 0."""
    row, column = start
    for move in moves:
        down, right = MOVES.get(move, (size, size))
        row, column = row + down, column + right
        if not (0 <= row < size and 0 <= column < size):
            return 0.0
    return float([row, column] == goal)


def score(response: str, entry: dict) -> float:
    """Score one response, given as text with special tokens."""
    answer = response.removesuffix(EOS)
    if "walk" in entry["metadata"]:
        return walk_score(answer, **entry["metadata"]["walk"]) if response.endswith(EOS) else 0.0
    if "is_worked_out" in entry["metadata"]:
        answer = answer.rpartition("=")[2]
    return SCORER.score_answer(answer, entry=entry)


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
    responses = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    scores = [score(response, json.loads(label)) for response, label in zip(responses, labels, strict=True)]
    rewards = (torch.tensor(scores) == 1).float()
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
