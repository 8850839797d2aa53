"""Runs that end early, started like a user does, and the output of their terminals."""

import re
import sys
import time
from pathlib import Path

import pipeline
import psutil

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


# With this command, the processes of the run descend from it.
WARM = [sys.executable, str(pipeline.SUPPORT / "warm_start.py")]


class Run:
    """A run as the recipes start it. All its processes are ended at the end of the test.

    They descend from the test's process, because that of `pipeline.warm_python` does.
    """

    def __init__(self, directory: Path, python: str | None = None, **changes) -> None:
        self.directory, self.terminal = directory, directory / "terminal"
        given = dict(policy_loss="bapo", data__max_samples=64, train__num_episodes=100, ckpt__path=directory / "ckpt")
        train = [python or pipeline.warm_python(), "-m", "openrlhf_bapo.cli.main", "train"]
        self._others = set(psutil.Process().children(recursive=True))
        train += pipeline.flags(directory, **given | changes)
        script = 'set -euo pipefail; source scripts/follow.sh; follow "$@"'
        self.command = ["bash", "-c", script, "run", str(directory / "train.log"), "1", *train]

    def __enter__(self):
        self._running = pipeline.running(self.command, self.terminal)
        self.process = self._running.__enter__()
        return self

    def __exit__(self, *error):
        self._running.__exit__(*error)

    def wait_for(self, text: str) -> None:
        """Wait until the terminal shows `text`."""
        log = self.directory / "train.log"
        pipeline.wait_until(lambda: text in self.terminal.read_text(), self.process, log)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Return the processes of the run whose title starts with `name`."""
        children = set(psutil.Process().children(recursive=True)) - self._others
        return [child for child in children if is_left(child) and child.cmdline()[0].startswith(name)]

    def end(self) -> tuple[int, list[str]]:
        """Wait until the run and all its processes have ended; returns the exit code and the terminal's lines."""
        processes = self.processes()
        code = self.process.wait()
        while any(map(is_left, processes)):
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


def step_said(lines: list[str]) -> int:
    """Return the step after which a signal ended the run, according to its output."""
    return int(re.search(r", after step (\d+)", lines[-3])[1])


def last_step(lines: list[str]) -> int:
    """Return the last step shown. Ray may not have forwarded the line of the step after it."""
    return int(max(re.findall(r"\] step +(\d+)", "\n".join(lines)), key=int))


def assert_a_failing_reward_is_said_and_the_first_step_is_saved(directory: Path, **mode) -> None:
    """Run with a reward function that fails in the second step, and assert what the terminal says."""
    pipeline.make_model(directory)
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


def assert_a_killed_process_is_said(directory: Path, name: str, what: str) -> None:
    """Kill a Ray actor in the third step, and assert what the terminal says.

    Args:
        directory: of the run.
        name: the class of the actor.
        what: the actor's name for users.
    """
    pipeline.make_model(directory)
    with Run(directory, ckpt__save_steps=1) as run:
        run.wait_for("step    2")
        (victim,) = run.processes(f"ray::{name}")
        victim.kill()
        code, lines = run.end()
    assert code == 1
    died = rf"{what} \({name}, pid {victim.pid}, ip [\d.]+\) died"
    assert_says(lines, directory, f"{died}; killed from outside")
