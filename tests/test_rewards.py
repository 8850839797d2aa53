"""Rewards on their way into samples: OpenRLHF's three ways look alike, and a failed one ends the run."""

import asyncio

import pipeline
import pytest
import torch


@pytest.fixture
def generator(tmp_path):
    argv = pipeline.flags(tmp_path, reward__remote_url="http://verifier/get_reward,http://second/get_reward")
    return pipeline.samples_generator(pipeline.parse(argv))


def response(reward, extra=1.0) -> dict:
    return pipeline.response(reward=reward) | {"extra_logs": {"extra": extra}}


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


@pytest.mark.parametrize("reward", [None, [None], float("nan"), [float("inf")], "high", ["high"], {"a": 1}])
def test_a_failed_reward_ends_the_run_with_the_flag(generator, reward):
    with pytest.raises(
        RuntimeError, match="--reward.remote_url http://verifier/get_reward,http://second.*: .*RolloutRayActor"
    ):
        generator._process_response_into_experience(response(reward), max_len=8)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('gone')", "ValueError: gone ({file}, line 2)"),
        ("return [1.0]", "the answer is '[1.0]', no dict with 'rewards'"),
        ("return None", "the answer is 'None', no dict with 'rewards'"),
        ("return {'scores': 1.0}", "the answer is \"{'scores': 1.0}\", no dict with 'rewards'"),
    ],
)
def test_a_reward_function_that_fails_says_how_where_the_run_ends(generator, tmp_path, body, said):
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    file = tmp_path / "reward.py"
    file.write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    executor = SingleTurnAgentExecutor(str(file))
    (answer,) = asyncio.run(executor._fetch_rewards_via_func(["1+2=3"], ["1+2="], ["3"]))
    failed = pipeline.response(reward=answer["rewards"]) | {"extra_logs": answer["extra_logs"]}
    with pytest.raises(RuntimeError) as error:
        generator._process_response_into_experience(failed, max_len=8)
    assert str(error.value).endswith(f"the reward of a response is None: {said.replace('{file}', str(file))}")
