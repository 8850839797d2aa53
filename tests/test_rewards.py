"""Rewards on their way into samples: OpenRLHF's three ways look alike, and a failed one ends the run."""

from types import SimpleNamespace

import pytest
import torch

from openrlhf_bapo.adapter.samples_generator import VersionedSamplesGenerator


@pytest.fixture
def generator():
    generator = VersionedSamplesGenerator.__new__(VersionedSamplesGenerator)  # without engines
    generator.args = SimpleNamespace(
        reward=SimpleNamespace(remote_url=["http://verifier/get_reward"]), offpolicy=SimpleNamespace(ratio_base=None)
    )
    return generator


def response(reward, extra=1.0) -> dict:
    """A response as OpenRLHF's SingleTurnAgentExecutor returns it."""
    return {
        "prompt": "1+2=",
        "label": "3",
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": [4, 5, 6, 7],
        "action_ranges": [(2, 4)],
        "rollout_log_probs": None,
        "truncated": False,
        "reward": reward,
        "scores": reward,
        "extra_logs": {"extra": extra},
    }


@pytest.mark.parametrize(
    ("reward", "extra"),
    [(0.5, 1.0), ([0.5], [1.0]), (torch.tensor([0.5]), torch.tensor([1.0]))],
    ids=["agent", "server", "file"],
)
def test_a_servers_list_of_one_is_a_number_like_any_other(generator, reward, extra):
    sample = generator._process_response_into_experience(response(reward, extra), max_len=8)
    assert sample.rewards.shape == sample.scores.shape == sample.info["reward"].shape == sample.info["extra"].shape
    assert sample.rewards.shape == (1,)
    assert (sample.rewards.item(), sample.scores.item(), sample.info["extra"].item()) == (0.5, 0.5, 1.0)


@pytest.mark.parametrize("reward", [None, [None], float("nan"), [float("inf")]])
def test_a_failed_reward_ends_the_run_with_the_flag(generator, reward):
    with pytest.raises(RuntimeError, match="--reward.remote_url http://verifier/get_reward: .*RolloutRayActor"):
        generator._process_response_into_experience(response(reward), max_len=8)
