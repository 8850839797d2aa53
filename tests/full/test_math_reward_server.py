"""The math reward over HTTP, requested by OpenRLHF's code, and as a reward-function file."""

import asyncio
import contextlib
import http.client
import json
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from openrlhf.utils.agent import SingleTurnAgentExecutor
from pipeline import REPOSITORY, free_port, running
from test_math_answers import group_processes, wait_until_none_is_left

from openrlhf_bapo.cli import serve_math_reward
from openrlhf_bapo.math_tasks import reward as math_reward

COMMAND = [sys.executable, "-m", "openrlhf_bapo.cli.serve_math_reward"]
PROMPT = "<|im_start|>user\nHow much is it? Answer in \\boxed{0}.<|im_end|>\n<|im_start|>assistant\n"


HOSTILE = r"\boxed{9^{9^{9^{9}}}+1}"


def wait_until_it_listens(process, log) -> None:
    while "grading math answers at" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the address of a server with 2 workers and a limit of 2 seconds per answer."""
    log, port = tmp_path_factory.mktemp("server") / "log", free_port()
    command = [*COMMAND, "--port", str(port), "--workers", "2", "--time_limit", "2"]
    with running(command, log) as process:
        wait_until_it_listens(process, log)
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0, log.read_text()
        wait_until_none_is_left(process.pid)
        assert len(log.read_text().splitlines()) == 1 + log.read_text().count("exceeded the time limit")


def post(server: str, body: bytes) -> tuple[int, dict]:
    """Post a body to the server; return status and JSON of its answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{server}/get_reward", body)) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def samples() -> list[tuple[str, str, float]]:
    """Return 64 tuples (query, label, reward). Every 4th needs a worker, every 16th is hostile, half are right."""
    found = []
    for i in range(64):
        is_right = i % 8 < 4
        if i % 16 == 15:
            response, label, is_right = HOSTILE, str(i), False
        elif i % 4 == 0:
            response, label = f"\\boxed{{\\sqrt{{{2 * (i + 1) ** 2}}}}}", f"{i + 1 + (not is_right)}\\sqrt{{2}}"
        else:
            response, label = f"\\boxed{{{i}}}", str(i + (not is_right))
        found.append((f"{PROMPT}{response}<|im_end|>", label, float(is_right)))
    return found


def ask_at_once(executor: SingleTurnAgentExecutor, fetch: str) -> list[dict]:
    """Request all samples at once through OpenRLHF's code, each in a separate thread; return the results."""
    results = [None] * 64

    def ask(i: int, query: str, label: str) -> None:
        (results[i],) = asyncio.run(getattr(executor, fetch)([query], [PROMPT], [label]))

    threads = [threading.Thread(target=ask, args=(i, query, label)) for i, (query, label, _) in enumerate(samples())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_64_simultaneous_requests_of_openrlhf_each_get_their_own_reward(server):
    results = ask_at_once(SingleTurnAgentExecutor(f"{server}/get_reward"), "_fetch_rewards_via_http")
    rewards = [reward for _, _, reward in samples()]
    assert [result["rewards"] for result in results] == [[reward] for reward in rewards]
    assert [result["scores"] for result in results] == [[reward] for reward in rewards]
    timeouts = [result["extra_logs"]["graded_timeouts"] for result in results]
    assert timeouts == [[float(i % 16 == 15)] for i in range(64)]


def test_the_example_gives_openrlhf_the_same_rewards_without_a_server(monkeypatch):
    monkeypatch.setattr(math_reward.GRADER, "time_limit", 2.0)
    executor = SingleTurnAgentExecutor(str(REPOSITORY / "examples" / "math_reward.py"))
    results = ask_at_once(executor, "_fetch_rewards_via_func")
    assert [result["rewards"] for result in results] == [[reward] for _, _, reward in samples()]
    assert all(result["scores"] == result["rewards"] for result in results)
    timeouts = [result["extra_logs"]["graded_timeouts"] for result in results]
    assert timeouts == [[float(i % 16 == 15)] for i in range(64)]


def test_a_request_with_several_queries_gets_their_rewards_in_order(server):
    queries, labels, rewards = map(list, zip(*samples()[:8], strict=True))
    body = json.dumps({"query": queries, "prompts": [PROMPT] * 8, "labels": labels}).encode()
    status, result = post(server, body)
    assert (status, result["rewards"]) == (200, rewards)


def test_labels_may_be_numbers(server):
    body = json.dumps({"query": ["\\boxed{27}"] * 3, "prompts": [""] * 3, "labels": [27.0, 27, 28.0]}).encode()
    assert post(server, body)[1]["rewards"] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"{" * 10, "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "JSON object"),
        (b"{}", "query must be a list of texts"),
        (b'{"query": "5", "prompts": [""], "labels": ["5"]}', "query must be a list of texts"),
        (b'{"query": ["5"], "prompts": [1], "labels": ["5"]}', "prompts must be a list of texts"),
        (b'{"query": ["5"], "prompts": [""], "labels": [null]}', "labels must be a list of texts or numbers"),
        (b'{"query": ["5"], "prompts": [""], "labels": []}', "same length, not [1, 1, 0]"),
    ],
)
def test_a_malformed_request_is_told_what_is_wrong_and_the_next_one_is_served(server, body, said):
    status, result = post(server, body)
    assert status == 400 and said in result["error"] and "\n" not in result["error"]
    good = json.dumps({"query": ["\ud800 #### 5"], "prompts": [""], "labels": ["5"]}).encode()
    assert post(server, good)[1]["rewards"] == [1.0]


def test_health_counts_what_failed(server):
    def timeouts() -> int:
        with urllib.request.urlopen(f"{server}/health") as response:
            health = json.load(response)
        assert health["status"] == "ok" and health["crashes"] == 0
        return health["timeouts"]

    before = timeouts()
    post(server, json.dumps({"query": [HOSTILE], "prompts": [""], "labels": ["1"]}).encode())
    assert timeouts() == before + 1


def test_a_body_above_the_limit_is_refused_in_one_line_and_the_next_one_is_served(server):
    status, result = post(server, b" " * (serve_math_reward.LARGEST_BODY + 1))
    assert status == 413 and f"more than {serve_math_reward.LARGEST_BODY}" in result["error"]
    assert "\n" not in result["error"]
    good = json.dumps({"query": ["#### 5"], "prompts": [""], "labels": ["5"]}).encode()
    assert post(server, good.ljust(serve_math_reward.LARGEST_BODY))[1]["rewards"] == [1.0]


@pytest.mark.parametrize("path", ["docs", "redoc", "openapi.json"])
def test_there_are_no_pages_about_the_server(server, path):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server}/{path}")


def test_the_server_listens_on_loopback_unless_told(server):
    port = int(server.rpartition(":")[2])
    listening = [
        line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    ]
    assert f"0100007F:{port:04X}" in listening and f"00000000:{port:04X}" not in listening


def ask_in_the_background(port: int, answers: list) -> threading.Thread:
    """Post four hostile answers in one request from a thread, which appends the result to `answers`."""
    body = json.dumps({"query": [HOSTILE] * 4, "prompts": [""] * 4, "labels": ["2"] * 4}).encode()

    def ask() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server was killed
            answers.append(post(f"http://127.0.0.1:{port}", body))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


def wait_until_a_worker_computes(group: int) -> None:
    while len(group_processes(group)) < 3:  # the server, a worker, and its child
        time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_that_ends_during_work_leaves_no_process(tmp_path, how):
    log, port = tmp_path / "log", free_port()
    with running([*COMMAND, "--port", str(port), "--workers", "2", "--time_limit", "100"], log) as process:
        wait_until_it_listens(process, log)
        answers = []
        thread = ask_in_the_background(port, answers)
        wait_until_a_worker_computes(process.pid)
        process.send_signal(how)
        assert process.wait() == (-signal.SIGKILL if how == signal.SIGKILL else 0), log.read_text()
        thread.join()
        wait_until_none_is_left(process.pid)
    assert how == signal.SIGKILL or answers == [(503, {"error": "the server is shutting down"})]


def test_one_worker_serves_an_ordinary_answer_while_four_hostile_ones_wait(tmp_path):
    log, port = tmp_path / "log", free_port()
    with running([*COMMAND, "--port", str(port), "--workers", "1", "--time_limit", "10"], log) as process:
        wait_until_it_listens(process, log)
        answers = []
        ask_in_the_background(port, answers)
        wait_until_a_worker_computes(process.pid)
        body = json.dumps({"query": [r"\boxed{\sqrt{8}}"], "prompts": [""], "labels": [r"2\sqrt{2}"]}).encode()
        assert post(f"http://127.0.0.1:{port}", body)[1]["rewards"] == [1.0] and answers == []
        process.kill()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--workers", "0"], "--workers 0: allowed: 1 or more"),
        (["--time_limit", "0"], "--time_limit 0: allowed: a number of seconds above 0"),
        (["--time_limit", "nan"], "--time_limit nan: allowed: "),
        (["--port", "99999999"], "--port 99999999: "),
        (["--host", "256.0.0.1"], "--host 256.0.0.1 "),
        (["--worker", "x"], "'x'"),
    ],
)
def test_a_wrong_flag_ends_in_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as error:
        serve_math_reward.main(flags)
    message = capsys.readouterr().err
    assert error.value.code == 2 and said in message and message.count("\n") == 1


def test_a_taken_port_ends_in_one_line(server, capsys):
    port = server.rpartition(":")[2]
    with pytest.raises(SystemExit) as error:
        serve_math_reward.main(["--host", "127.0.0.1", "--port", port])
    message = capsys.readouterr().err
    assert error.value.code == 2 and f"--port {port}: " in message and message.count("\n") == 1
