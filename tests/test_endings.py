"""What the terminal says last when a run ends before its time: the cause, what is saved, and where the output is."""

import errno
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pipeline
import psutil
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_bapo.adapter.failures import describe_failure
from openrlhf_bapo.adapter.interrupts import Interrupted
from openrlhf_bapo.cli.progress import describe_bar

FAILING_REWARD = """
import torch

calls = 0


def reward_func(queries, prompts, labels, **kwargs):
    global calls
    calls += 1
    if calls > 80:  # in the second step, of 64 responses each
        raise ValueError("the verifier has gone")
    return {"rewards": torch.tensor([float(len(queries[0]) % 2)])}
"""

SLOW_REWARD = """
import pathlib, time


def reward_func(queries, prompts, labels, **kwargs):
    pathlib.Path(__file__).with_name("asked").touch()
    time.sleep(3600)
"""

ENDS_ITS_ENGINE = """
import psutil, torch

calls = 0


def reward_func(queries, prompts, labels, **kwargs):
    global calls
    calls += 1
    if calls == 128:  # the second step's last: the next that meets the engine is the actor, with new weights
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("VLLM"):
                process.kill()
    return {"rewards": torch.tensor([float(len(queries[0]) % 2)])}
"""


FAILS_IN_AN_ENGINE = """
import sys

if "vllm" in sys.modules:
    raise OSError("no licence on this node")


def reward_func(queries, prompts, labels, **kwargs): ...
"""


class Run:
    """A run as the recipes start it, ended with all its processes at the end of the test."""

    def __init__(self, directory: Path, **changes) -> None:
        self.directory, self.terminal = directory, directory / "terminal"
        changes = dict(data__max_samples=64, train__num_episodes=100, ckpt__path=directory / "ckpt") | changes
        train = [".venv/bin/python", "-m", "openrlhf_bapo.cli.main", "train"]
        train += pipeline.flags(directory, policy_loss="bapo", **changes)
        script = 'set -euo pipefail; source scripts/follow.sh; follow "$@"'
        self.command = ["bash", "-c", script, "run", str(directory / "train.log"), "1", *train]

    def __enter__(self):
        self._running = pipeline.running(self.command, self.terminal)
        self.process = self._running.__enter__()
        return self

    def __exit__(self, *error):
        self._running.__exit__(*error)

    def wait_for(self, text: str) -> None:
        """Until the terminal shows it."""
        log = self.directory / "train.log"
        pipeline.wait_until(lambda: text in self.terminal.read_text(), self.process, log)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Of the run, those whose title starts with `name`."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if is_left(child) and child.cmdline()[0].startswith(name)]

    def end(self, seconds: float = 400) -> tuple[int, list[str]]:
        """Exit code and what a person sees, when the run and all its processes have ended."""
        processes = self.processes()
        code = self.process.wait(seconds)
        end = time.monotonic() + 60
        while any(map(is_left, processes)):
            assert time.monotonic() < end, [child for child in processes if is_left(child)]
            time.sleep(0.2)
        return code, self.terminal.read_text().splitlines()


def is_left(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and bool(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def assert_says(lines: list[str], directory: Path, cause: str, step: str = r"\d+") -> None:
    ended, saved, log = lines[-3:]
    assert re.search(f"openrlhf-bapo: the run has ended: {cause}", ended), lines[-10:]
    assert re.search(rf"openrlhf-bapo: saved is {directory}/ckpt \(global_step{step}\); .*--ckpt.load_enable", saved)
    assert log == f"openrlhf-bapo: the whole output is in {directory}/train.log"
    assert not any("Traceback" in line for line in lines)


def last_step(lines: list[str]) -> int:
    return int(max(re.findall(r"\] step +(\d+)", "\n".join(lines)), key=int))


@pytest.mark.pipeline
@pytest.mark.parametrize("mode", [{}, dict(train__async_enable=True)], ids=["sync", "async"])
def test_a_reward_function_that_fails_in_the_second_step_is_the_last_thing_said_and_the_first_step_is_saved(
    tmp_path, mode
):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(FAILING_REWARD)
    with Run(directory, **mode) as run:
        run.wait_for("step    1")
        code, lines = run.end()
    assert code == 1
    where = rf"ValueError: the verifier has gone \({directory}/reward.py, line 11\)"
    cause = f"--reward.remote_url {directory}/reward.py: {where}; 2 of a batch's 16 prompt groups have no reward"
    assert_says(lines, directory, cause, step="1")
    log = (directory / "train.log").read_text()
    assert "Traceback" in log
    bars = {bar for line in log.splitlines() if (bar := describe_bar(line))}
    assert {"  generate samples: 16 of 16 prompts", "  train epoch [1/1]: 8 of 8 micro-batches of a rank"} <= bars


@pytest.mark.pipeline
def test_an_engine_that_does_not_start_ends_the_run(tmp_path):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(FAILS_IN_AN_ENGINE)
    with Run(directory) as run:
        code, lines = run.end()
    assert code == 1
    said = r"the run has ended: a rollout engine \(RolloutRayActor.*\) did not start: OSError: no licence on this node"
    assert re.search(said, lines[-3]), lines[-10:]


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("kill", "said"),
    [("RolloutRayActor", "a rollout engine"), ("PolicyModelActor", "an actor's process, which trains")],
)
def test_a_process_that_is_killed_is_the_last_thing_said(tmp_path, kill, said):
    directory = pipeline.make_model(tmp_path)
    with Run(directory, ckpt__save_steps=1) as run:
        run.wait_for("step    2")
        (victim,) = run.processes(f"ray::{kill}")
        victim.kill()
        code, lines = run.end()
    assert code == 1
    assert_says(lines, directory, rf"{said} \({kill}, pid {victim.pid}, ip [\d.]+\) died; killed from outside")


@pytest.mark.pipeline
def test_an_engine_that_dies_before_the_weights_are_sent_is_the_last_thing_said(tmp_path):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(ENDS_ITS_ENGINE)
    with Run(directory, ckpt__save_steps=1) as run:
        run.wait_for("step    1")
        code, lines = run.end()
    assert code == 1
    assert_says(lines, directory, r"a rollout engine \(vLLM's EngineCore\) died; killed from outside", step="1")
    assert "gloo" in (directory / "train.log").read_text()  # all that the actor knows


@pytest.mark.pipeline
def test_sigterm_and_ctrl_c_finish_the_step_save_it_and_a_resumed_run_goes_on_from_there(tmp_path):
    directory = pipeline.make_model(tmp_path)
    with Run(directory, train__async_enable=True, train__async_queue_size=2) as run:  # and resumed without
        run.wait_for("step    2")
        os.kill(run.process.pid, signal.SIGTERM)  # the script alone, as Kubernetes does
        code, lines = run.end()
    first = last_step(lines)
    assert code == 143
    assert_says(lines, directory, f"SIGTERM, after step {first}", step=str(first))
    with Run(directory, ckpt__load_enable=True) as run:
        run.wait_for(f"step {first + 1:4}")
        os.killpg(run.process.pid, signal.SIGINT)  # the terminal's whole group, as Ctrl-C does
        code, lines = run.end()
    second = last_step(lines)
    assert code == 130 and second > first and f"step {first:4}" not in "\n".join(lines)
    assert_says(lines, directory, f"SIGINT, after step {second}", step=str(second))


@pytest.mark.pipeline
def test_a_signal_while_the_engines_start_ends_the_run_before_its_first_step(tmp_path):
    directory = pipeline.make_model(tmp_path)
    with Run(directory) as run:
        pipeline.wait_until(lambda: run.processes("ray::RolloutRayActor"), run.process, directory / "train.log")
        os.kill(run.process.pid, signal.SIGTERM)
        code, lines = run.end()
    assert code == 143
    assert "the run has ended: SIGTERM, before its first step" in lines[-3] and "nothing is saved" in lines[-2]


ENDING = """
import sys, time, ray
from openrlhf_bapo.adapter.interrupts import catch_signals
from openrlhf_bapo.cli import train_ppo_ray

signals = []
catch_signals(signals, finishes_step=False)


def shutdown():
    print("up", flush=True)
    time.sleep(600)


ray.shutdown = shutdown  # stands for one that takes long
folders = {"ckpt.path": "none", "ckpt.output_dir": "none", "logger.tensorboard_dir": None, "ckpt.save_steps": 1}
train_ppo_ray._end(ValueError("the cause"), folders, signals)
"""


def test_a_signal_while_a_run_ends_ends_its_process_at_once(tmp_path):
    command = [".venv/bin/python", "-c", ENDING]
    with pipeline.running(command, tmp_path / "log") as process:
        pipeline.wait_until(lambda: "up" in (tmp_path / "log").read_text(), process, tmp_path / "log")
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert "KeyboardInterrupt" not in (tmp_path / "log").read_text()


@pytest.mark.pipeline
def test_a_second_signal_ends_a_run_at_once(tmp_path):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(SLOW_REWARD)
    with Run(directory) as run:
        pipeline.wait_until((directory / "asked").exists, run.process, directory / "train.log")
        os.kill(run.process.pid, signal.SIGTERM)
        run.wait_for("SIGTERM: ends after this training step")
        os.kill(run.process.pid, signal.SIGTERM)
        code, lines = run.end(120)  # a reward takes an hour
    assert code == 143
    assert re.search("the run has ended: SIGTERM, SIGTERM, at once", lines[-3])
    assert "nothing is saved" in lines[-2]


def test_a_signal_to_the_script_reaches_the_command_whose_exit_code_it_keeps(tmp_path):
    command = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True)"
    script = f'set -euo pipefail; source scripts/follow.sh; follow {tmp_path}/log 1 "$@"; echo never'
    run = ["bash", "-c", script, "run", ".venv/bin/python", "-c", f"{command}; time.sleep(600)"]
    with open(tmp_path / "terminal", "w") as terminal:
        process = subprocess.Popen(run, cwd=pipeline.REPOSITORY, stdout=terminal, stderr=terminal)
    pipeline.wait_until(
        lambda: (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text(), process, tmp_path
    )
    process.terminate()
    assert process.wait(60) == 7
    assert (tmp_path / "terminal").read_text().splitlines()[
        -1
    ] == f"openrlhf-bapo: the whole output is in {tmp_path}/log"


def carried(error: BaseException) -> RayTaskError:
    """As Ray carries it home through two processes."""
    for place in ("ray::PPOTrainer.fit", "ray::PolicyModelActor.fit"):
        error = RayTaskError(place, f"Traceback ...\n{type(error).__name__}", error).as_instanceof_cause()
    return error


ARGS = {"ckpt.path": "ckpt", "ckpt.output_dir": "out", "logger.tensorboard_dir": None, "ckpt.save_steps": -1}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("episode"), "KeyError: 'episode'"),
        (
            OSError(errno.ENOSPC, "No space left on device", "ckpt/x"),
            "a disk is full: [Errno 28] No space left on device",
        ),
        (RuntimeError("--reward.remote_url a.py: failed\nmore"), "--reward.remote_url a.py: failed"),
        (FloatingPointError("policy_loss is nan"), "FloatingPointError: policy_loss is nan"),
        (Interrupted("after step 3"), "after step 3"),
        (ValueError("\n\n  first\nsecond"), "ValueError: first"),
        (ValueError(), "ValueError"),
        (ActorDiedError(), "a Ray actor, or its node's raylet, died; killed from outside"),
        (EngineDeadError(), "a rollout engine (vLLM's EngineCore) died; killed from outside"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_cause_is_one_line_from_whichever_process_it_comes(tmp_path, monkeypatch, error, said):
    monkeypatch.chdir(tmp_path)
    for one in (error, carried(error)):
        ended, saved = describe_failure(one, ARGS, [])
        assert ended.startswith(f"the run has ended: {said}") and "\n" not in ended
        assert saved.startswith("nothing is saved, the same command starts anew (--ckpt.save_steps -1: never")
    assert describe_failure(error, ARGS, [15])[0].startswith(f"the run has ended: SIGTERM, {said}")


def test_a_full_disk_is_named_whatever_the_exception_says(tmp_path):
    args = ARGS | {"ckpt.path": "/proc/nowhere/ckpt", "ckpt.output_dir": str(tmp_path)}  # where there is never room
    ended, _ = describe_failure(RuntimeError("iostream error"), args, [])
    assert ended == "the run has ended: RuntimeError: iostream error; the disk of /proc is full (0 bytes free)"
