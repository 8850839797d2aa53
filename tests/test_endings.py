"""What the terminal says last when a run ends before its time: the cause, what is saved, and where the output is."""

import re
import sys
from pathlib import Path

import pipeline
import psutil
import pytest

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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("tiny"))


def run_on_a_terminal(directory: Path, kill: str | None, **changes) -> tuple[int, list[str]]:
    """Exit code, and what a person sees, of a run as the recipes start it.

    Args:
        kill: the Ray actor class whose process is killed after the second step.
    """
    flags = pipeline.flags(
        directory,
        policy_loss="bapo",
        data__max_samples=64,
        train__num_episodes=100,
        ckpt__path=directory / "ckpt",
        ckpt__save_steps=1,
        ckpt__max_num=2,
        **changes,
    )
    program = f"{sys.executable} -m openrlhf_bapo.cli.main"
    command = f'set -o pipefail; {program} train "$@" 2>&1 | {program} progress --log {directory}/train.log'
    terminal = directory / "terminal"
    with pipeline.running(["bash", "-c", command, "run", *flags], terminal) as process:
        if kill:
            pipeline.wait_until(lambda: "step    2" in terminal.read_text(), process, directory / "train.log")
            (victim,) = [
                child
                for child in psutil.Process(process.pid).children(recursive=True)
                if child.cmdline()[:1] and child.cmdline()[0].startswith(f"ray::{kill}")
            ]
            victim.kill()
        code = process.wait(400)
        assert not [child for child in psutil.process_iter() if str(directory) in " ".join(child.cmdline())]
    return code, terminal.read_text().splitlines()


def assert_says(lines: list[str], directory: Path, cause: str) -> None:
    ended, saved, log = lines[-3:]
    assert re.search(f"openrlhf-bapo: the run has ended: {cause}", ended), lines[-10:]
    assert re.search(rf"openrlhf-bapo: saved is {directory}/ckpt \(global_step\d+\); .*--ckpt.load_enable", saved)
    assert log == f"openrlhf-bapo: the whole output is in {directory}/train.log"
    assert not any("Traceback" in line for line in lines)
    assert "Traceback" in (directory / "train.log").read_text()


@pytest.mark.pipeline
def test_a_reward_function_that_fails_in_the_second_step_is_the_last_thing_said(tiny, tmp_path):
    directory = pipeline.make_model(tmp_path)
    (directory / "reward.py").write_text(FAILING_REWARD)
    code, lines = run_on_a_terminal(directory, kill=None)
    assert code == 1
    where = rf"ValueError: the verifier has gone \({directory}/reward.py, line 11\)"
    assert_says(
        lines, directory, f"--reward.remote_url {directory}/reward.py: the reward of a response is None: {where}"
    )


@pytest.mark.pipeline
@pytest.mark.parametrize(
    ("kill", "said"),
    [("RolloutRayActor", "a rollout engine"), ("PolicyModelActor", "an actor's process, which trains")],
)
def test_a_process_that_is_killed_is_the_last_thing_said(tmp_path, kill, said):
    directory = pipeline.make_model(tmp_path)
    code, lines = run_on_a_terminal(directory, kill)
    assert code == 1
    assert_says(lines, directory, rf"{said} \({kill}, pid \d+, ip [\d.]+\) died; killed from outside")
