"""The math reward over HTTP, requested by OpenRLHF's code, and as a reward-function file."""

import asyncio
import contextlib
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
from pipeline import REPOSITORY, free_port, refusal, running, wait_until
from test_math_answers import group_processes, wait_until_none_is_left

from openrlhf_bapo.cli import serve_math_reward
from openrlhf_bapo.math_tasks import reward as math_reward

COMMAND = [sys.executable, "-m", "openrlhf_bapo.cli.serve_math_reward"]
PROMPT = "<|im_start|>user\nHow much is it? Answer in \\boxed{0}.<|im_end|>\n<|im_start|>assistant\n"


HOSTILE = r"\boxed{9^{9^{9^{9}}}+1}"


@contextlib.contextmanager
def serving(log: Path, num_workers: int, time_limit: int):
    """Run a server; yields its process and its address."""
    port = str(free_port())
    command = [*COMMAND, "--port", port, "--workers", str(num_workers), "--time_limit", str(time_limit)]
    with running(command, log) as process:
        wait_until(lambda: "grading math answers at" in log.read_text(), process, log)
        yield process, f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Return the address of a server with 2 workers and a limit of 2 seconds per answer."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, 2, 2) as (process, address):
        yield address
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


@pytest.mark.parametrize("source", ["server", "file"])
def test_64_simultaneous_requests_of_openrlhf_each_get_their_own_reward(server, monkeypatch, source):
    monkeypatch.setattr(math_reward.GRADER, "time_limit", 2.0)
    if source == "server":
        results = ask_at_once(SingleTurnAgentExecutor(f"{server}/get_reward"), "_fetch_rewards_via_http")
    else:
        executor = SingleTurnAgentExecutor(str(REPOSITORY / "examples" / "math_reward.py"))
        results = ask_at_once(executor, "_fetch_rewards_via_func")
    for i, (result, (_, _, reward)) in enumerate(zip(results, samples(), strict=True)):
        assert result["rewards"] == result["scores"] == [reward]
        assert result["extra_logs"]["graded_timeouts"] == [float(i % 16 == 15)]


def body_of(queries: list[str], labels: list, prompt: str = "") -> bytes:
    return json.dumps({"query": queries, "prompts": [prompt] * len(queries), "labels": labels}).encode()


def test_a_request_with_several_queries_gets_their_rewards_in_order_for_labels_of_text_or_numbers(server):
    queries, labels, rewards = map(list, zip(*samples()[:8], strict=True))
    status, result = post(server, body_of(queries, labels, PROMPT))
    assert (status, result["rewards"]) == (200, rewards)
    assert post(server, body_of(["\\boxed{27}"] * 3, [27.0, 27, 28.0]))[1]["rewards"] == [1.0, 1.0, 0.0]


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
        (b'{"query": ["5"], "prompts": [""], "labels": [""]}', "labels must not be empty"),
        (b'{"query": ["5"], "prompts": [""], "labels": []}', "same length, not [1, 1, 0]"),
    ],
)
def test_a_malformed_request_is_told_what_is_wrong_and_the_next_one_is_served(server, body, said):
    status, result = post(server, body)
    assert status == 400 and said in result["error"] and "\n" not in result["error"]
    assert post(server, body_of(["\ud800 #### 5"], ["5"]))[1]["rewards"] == [1.0]


def test_health_counts_what_failed(server):
    def timeouts() -> int:
        with urllib.request.urlopen(f"{server}/health") as response:
            health = json.load(response)
        assert health["status"] == "ok" and health["crashes"] == 0
        return health["timeouts"]

    before = timeouts()
    post(server, body_of([HOSTILE], ["1"]))
    assert timeouts() == before + 1


def test_a_body_above_the_limit_is_refused_in_one_line_and_the_next_one_is_served(server):
    status, result = post(server, b" " * (serve_math_reward.LARGEST_BODY + 1))
    assert status == 413 and f"more than {serve_math_reward.LARGEST_BODY}" in result["error"]
    assert "\n" not in result["error"]
    assert post(server, body_of(["#### 5"], ["5"]).ljust(serve_math_reward.LARGEST_BODY))[1]["rewards"] == [1.0]


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


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_server_serves_others_during_a_long_request_and_leaves_no_process_if_it_ends_then(tmp_path, how):
    answers = []
    with serving(tmp_path / "log", 2, 100) as (process, address):
        thread = threading.Thread(target=lambda: answers.append(post(address, body_of([HOSTILE] * 4, ["2"] * 4))))
        thread.start()
        while len(group_processes(process.pid)) < 3:  # the server, a worker, and its child, which computes
            time.sleep(0.1)
        assert post(address, body_of(["#### 5"], ["5"]))[1]["rewards"] == [1.0] and answers == []
        process.send_signal(how)
        assert process.wait() == 0
        thread.join()
        wait_until_none_is_left(process.pid)
    assert answers == [(503, {"error": "the server is shutting down"})]


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
    assert said in refusal(flags, capsys, serve_math_reward.main)


def test_a_taken_port_ends_in_one_line(server, capsys):
    port = server.rpartition(":")[2]
    flags = ["--host", "127.0.0.1", "--port", port]
    assert f"--port {port}: " in refusal(flags, capsys, serve_math_reward.main)
