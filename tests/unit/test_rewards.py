"""Rewards of samples: all kinds of reward sources give the same result, and invalid rewards reach no training step."""

import asyncio
import re
import socket
import threading
import time

import pipeline
import pytest
import torch
from openrlhf.trainer import ppo_trainer
from patience import PATIENCE

from openrlhf_bapo.openrlhf.reward_calls import FAILED_REWARD, KINDS, RewardLimits


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
def test_a_servers_list_of_one_is_read_as_a_number(generator, reward, extra):
    sample = generator._process_response_into_experience(response(reward, extra), max_len=8)
    assert sample.rewards.shape == sample.scores.shape == sample.info["reward"].shape == sample.info["extra"].shape
    assert sample.rewards.shape == (1,)
    assert (sample.rewards.item(), sample.scores.item(), sample.info["extra"].item()) == (0.5, 0.5, 1.0)


@pytest.mark.parametrize(("limits", "score", "is_said"), [((0, 1), -1, True), ((0, 1), 1, False), ((-1, 1), -1, False)])
def test_a_score_that_the_default_filter_is_not_made_for_is_said_once(tmp_path, capsys, limits, score, is_said):
    flags = dict(algo__dynamic_filtering_enable=True, reward__remote_url="http://verifier/get_reward")
    argv = [*pipeline.flags(tmp_path, **flags), "--algo.dynamic_filtering_range", *map(str, limits)]
    generator = pipeline.samples_generator(pipeline.parse(argv))
    for _ in range(2):
        generator._process_response_into_experience(response(score), max_len=8)
    said = f"--algo.dynamic_filtering_range 0 1: a response has the score {score}, and groups whose mean score"
    assert capsys.readouterr().out.count(said) == is_said


@pytest.mark.parametrize("reward", [1, [0], True, torch.tensor([1])])
def test_an_evaluation_takes_the_mean_of_rewards_that_are_integers_or_truth_values(generator, reward):
    sample = generator._process_response_into_experience(response(reward) | {"place": 0}, max_len=8)
    logs = ppo_trainer.compute_eval_metrics([(["data"], ["1+2="], ["3"], [None])], [sample] * 2, 2)
    assert logs["eval_data_pass1"] == logs["eval_data_pass2"] == (reward != [0])


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (None, "none"),
        ([float("inf")], "not_finite"),
        ({"a": 1}, "wrong_type"),
        ([], "wrong_length"),
    ],
)
def test_a_response_without_a_reward_is_marked_with_the_reason(generator, reward, reason):
    sample = generator._process_response_into_experience(response(reward), max_len=8)
    assert sample.rewards is None and sample.scores is None
    assert re.match(rf"{reason}: the reward of a response .*RolloutRayActor", str(sample.reward_fault))


# ---- A reward function ----


def ask_function(tmp_path, body: str, num_calls: int = 1, **limits) -> list[dict]:
    """Return the answers that OpenRLHF's executor gets for `num_calls` concurrent calls."""
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    (tmp_path / "reward.py").write_text(f"import time, torch\ndef reward_func(queries, prompts, labels):\n    {body}\n")
    executor = SingleTurnAgentExecutor(str(tmp_path / "reward.py"))
    executor.reward_limits = RewardLimits(**limits)

    async def ask() -> list[dict]:
        answers = (executor._fetch_rewards_via_func(["1+2=3"], ["1+2="], [str(n)]) for n in range(num_calls))
        return [answer for (answer,) in await asyncio.gather(*answers)]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("body", "reason", "said"),
    [
        ("raise ValueError('gone\\n  away')", "exception", "ValueError: gone away ({file}, line 3)"),
        ("raise SystemExit(3)", "exception", "RuntimeError: SystemExit(3)"),
        ("raise TimeoutError('a socket')", "exception", "TimeoutError: a socket ({file}, line 3)"),
        ("return [1.0]", "missing_key", "{file}: the answer is '[1.0]', not a dict with 'rewards'"),
        (
            "return {'scores': 1.0}",
            "missing_key",
            "{file}: the answer is \"{'scores': 1.0}\", not a dict with 'rewards'",
        ),
        ("return {'rewards': None}", "none", "{file}: 'rewards' is None"),
        ("return {'rewards': [None]}", "none", "{file}: 'rewards' is None"),
        ("return {'rewards': torch.tensor([float('nan')])}", "not_finite", "{file}: 'rewards' is nan"),
        ("return {'rewards': 1.0, 'scores': -float('inf')}", "not_finite", "{file}: 'scores' is -inf"),
        ("return {'rewards': [1.0, 2.0]}", "wrong_length", "{file}: 'rewards' has 2 values for one response"),
        ("return {'rewards': torch.zeros(0)}", "wrong_length", "{file}: 'rewards' has 0 values for one response"),
        ("return {'rewards': 'high'}", "wrong_type", "{file}: 'rewards' is 'high', not a number"),
        ("return {'rewards': 1.0, 'extra_logs': [1]}", "wrong_type", "{file}: 'extra_logs' is '[1]', not a dict"),
        ("return {'rewards': 1.0, 'extra_logs': {'a': 'b'}}", "wrong_type", "{file}: 'a' of 'extra_logs' is 'b', no"),
    ],
)
def test_the_fault_names_what_a_reward_function_did_wrong(tmp_path, body, reason, said):
    (answer,) = ask_function(tmp_path, body)
    assert answer["rewards"] is None
    cause = answer["extra_logs"][FAILED_REWARD]
    assert cause.startswith(f"{reason}: {said.replace('{file}', str(tmp_path / 'reward.py'))}") and "\n" not in cause
    assert reason in KINDS


@pytest.mark.parametrize(
    "body",
    [
        "return {'rewards': 2}",
        "return {'rewards': [2], 'scores': None}",
        "return {'rewards': torch.tensor([2]), 'scores': torch.tensor(2), 'extra_logs': None}",
        "return {'rewards': torch.tensor([[2]]).numpy(), 'scores': (2,), 'extra_logs': {}}",
    ],
)
def test_a_reward_function_may_answer_with_a_number_a_list_a_tensor_or_an_array(tmp_path, body):
    (answer,) = ask_function(tmp_path, body)
    assert answer == {"rewards": [2], "scores": [2], "extra_logs": {}}


@pytest.mark.parametrize("hangs", [f"time.sleep({PATIENCE})", "exec('while True: pass')"], ids=["in C", "in Python"])
def test_a_reward_function_that_hangs_ends_at_its_limit_and_does_not_delay_other_calls(tmp_path, hangs):
    # More calls than run at once: those that hang must give their places up.
    before = threading.active_count()
    body = f"if int(labels[0]) < 40: {hangs}\n    return {{'rewards': 1.0}}"
    answers = ask_function(tmp_path, body, num_calls=45, timeout=0.5)
    said = f"timeout: {tmp_path / 'reward.py'}: reward_func has not returned within 0.5 s"
    assert [answer["extra_logs"].get(FAILED_REWARD) for answer in answers] == [said] * 40 + [None] * 5
    if "while" in hangs:
        while threading.active_count() > before:  # what is Python is ended
            time.sleep(0.1)


# ---- Reward servers ----


GOOD = 200, '{"rewards": [0.5], "extra_logs": {"seen": [1]}}'


def executor_of(*urls: str, **limits):
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    executor = SingleTurnAgentExecutor(list(urls))
    executor.reward_limits = RewardLimits(**limits)
    return executor


async def ask(executor) -> dict:
    (answer,) = await executor._fetch_rewards_via_http(["1+2=3"], ["1+2="], ["3"])
    return answer


REWARDED = {"rewards": [0.5], "scores": [0.5], "extra_logs": {"seen": [1]}}


def test_a_server_that_goes_away_and_comes_back_answers_every_call(serve):
    server = serve(GOOD)
    executor = executor_of(server.url, patience=PATIENCE)

    async def through_a_restart() -> list[dict]:
        first = await ask(executor)
        server.stop()
        waiting = asyncio.gather(*(ask(executor) for _ in range(20)))
        await asyncio.sleep(2)
        assert not waiting.done()
        server.start()
        return [first, *await waiting]

    assert asyncio.run(through_a_restart()) == [REWARDED] * 21
    assert server.requests[-1] == {"query": ["1+2=3"], "prompts": ["1+2="], "labels": ["3"]}


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408])
def test_a_server_that_is_busy_or_broken_for_a_while_is_asked_again(serve, status):
    server = serve((status, "not now"), (status, "not now"), GOOD)
    assert asyncio.run(ask(executor_of(server.url, patience=PATIENCE))) == REWARDED
    assert len(server.requests) == 3


def test_a_server_that_does_not_answer_in_time_is_asked_again(serve):
    server = serve(None, GOOD)
    assert asyncio.run(ask(executor_of(server.url, patience=PATIENCE, timeout=1.0))) == REWARDED
    assert len(server.requests) == 2


def test_it_is_asked_again_also_where_asyncio_has_its_own_timeout_error(serve, monkeypatch):
    monkeypatch.setattr(asyncio, "TimeoutError", type("TimeoutError", (Exception,), {}))  # as in Python 3.10
    test_a_server_that_does_not_answer_in_time_is_asked_again(serve)


@pytest.mark.parametrize(
    ("answer", "reason", "said"),
    [
        ((503, "closed\nfor good"), "http_status", "answers with HTTP 503: 'closed for good'; tried for 1 s"),
        (None, "timeout", "gives no answer within 0.5 s; tried for 1 s"),
    ],
)
def test_patience_ends_with_the_servers_last_answer(serve, answer, reason, said):
    server = serve(answer)
    found = asyncio.run(ask(executor_of(server.url, patience=1.0, timeout=0.5)))
    assert found == {"rewards": None, "extra_logs": {FAILED_REWARD: f"{reason}: {server.url} {said}"}}
    assert len(server.requests) > 1


def test_patience_counts_from_the_first_failure_however_often_a_server_is_asked_again(monkeypatch):
    from openrlhf_bapo.openrlhf import reward_calls

    monkeypatch.setattr(reward_calls, "_LONGEST_PAUSE", 0.1)
    with socket.socket() as nobody:  # has the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        executor = executor_of(f"http://127.0.0.1:{nobody.getsockname()[1]}/get_reward", patience=1.0)
        cause = asyncio.run(ask(executor))["extra_logs"][FAILED_REWARD]
    assert cause.endswith("; tried for 1 s")


def test_without_patience_a_dead_server_is_asked_once():
    url = f"http://127.0.0.1:{pipeline.free_port()}/get_reward"
    cause = asyncio.run(ask(executor_of(url, patience=0.0)))["extra_logs"][FAILED_REWARD]
    assert cause.startswith(f"unreachable: {url} does not answer (ClientConnectorError: ")


@pytest.mark.parametrize(
    ("answer", "reason", "said"),
    [
        ((404, "no such\npage"), "http_status", " answers with HTTP 404: 'no such page'"),
        ((200, "<html>"), "not_json", ": the answer is not JSON: '<html>'"),
        ((200, "[" * 100_000), "not_json", ": the answer is not JSON: '" + "[" * 80),
        ((200, '{"reward": [1]}'), "missing_key", ": the answer is \"{'reward': [1]}\", not a dict with 'rewards'"),
        ((200, '{"rewards": [NaN]}'), "not_finite", ": 'rewards' is nan"),
    ],
)
def test_an_invalid_answer_is_a_fault_with_the_servers_address_and_is_not_asked_for_again(serve, answer, reason, said):
    server = serve(answer)
    found = asyncio.run(ask(executor_of(server.url)))
    assert found["rewards"] is None
    assert found["extra_logs"][FAILED_REWARD].startswith(f"{reason}: {server.url}{said}")
    assert len(server.requests) == 1


def test_a_dead_server_is_skipped_while_another_answers_and_asked_again_later(serve):
    servers = [serve(GOOD), serve(GOOD)]
    executor = executor_of(*(server.url for server in servers), patience=PATIENCE)

    async def calls(number: int) -> list[dict]:
        return [await ask(executor) for _ in range(number)]

    assert asyncio.run(calls(10)) == [REWARDED] * 10
    assert [len(server.requests) for server in servers] == [5, 5]  # in turn
    servers[1].stop()
    dead = servers[1]
    assert asyncio.run(calls(10)) == [REWARDED] * 10
    assert len(servers[0].requests) == 15
    dead.start()
    while len(dead.requests) < 6:
        assert asyncio.run(ask(executor)) == REWARDED
        time.sleep(0.1)
    assert [server.num_failures for server in executor._servers._servers] == [0, 0]  # its next pause is short again


def test_pauses_grow_and_failures_of_concurrent_calls_count_as_one():
    from openrlhf_bapo.openrlhf.reward_calls import _Server

    server, pauses = _Server("http://a"), []
    for _ in range(9):
        began = time.monotonic()
        for _ in range(5):
            server.is_away(began, "away")
        pauses.append(round(server.away_until - time.monotonic(), 1))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
