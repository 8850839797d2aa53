"""The last lines of a run that fails, and the signals that reach the command through its script."""

import errno
import signal
import subprocess

import pipeline
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_bapo.openrlhf.interrupts import Interrupted
from openrlhf_bapo.run.failures import describe_failure

ENDING = """
import sys, time, ray
from openrlhf_bapo.run.interrupts import catch_signals
from openrlhf_bapo.cli import train_ppo_ray

signals = []
catch_signals(signals, [], finishes_step=False)


def shutdown():
    print("up", flush=True)
    time.sleep(600)


ray.shutdown = shutdown  # stands for a slow one
folders = {"ckpt.path": "none", "ckpt.output_dir": "none", "logger.tensorboard_dir": None, "ckpt.save_steps": 1}
folders |= {"algo.advantage.estimator": "group_norm"}
train_ppo_ray._end(ValueError("the cause"), folders, signals)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_shutdown_ends_the_process_at_once(tmp_path, number):
    command = [".venv/bin/python", "-c", ENDING]
    with pipeline.running(command, tmp_path / "log") as process:
        pipeline.wait_until(lambda: "up" in (tmp_path / "log").read_text(), process, tmp_path / "log")
        process.send_signal(number)
        assert process.wait() == -number
    assert "KeyboardInterrupt" not in (tmp_path / "log").read_text()


def test_a_signal_to_the_script_reaches_the_command_and_the_script_keeps_its_exit_code(tmp_path):
    command = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('up', flush=True)"
    script = f'set -euo pipefail; source scripts/follow.sh; follow {tmp_path}/log 1 "$@"; echo never'
    run = ["bash", "-c", script, "run", ".venv/bin/python", "-c", f"{command}; time.sleep({pipeline.PATIENCE})"]
    with open(tmp_path / "terminal", "w") as terminal:
        process = subprocess.Popen(run, cwd=pipeline.REPOSITORY, stdout=terminal, stderr=terminal)
    pipeline.wait_until(
        lambda: (tmp_path / "log").exists() and "up" in (tmp_path / "log").read_text(), process, tmp_path
    )
    process.terminate()
    assert process.wait() == 7
    last = (tmp_path / "terminal").read_text().splitlines()[-1]
    assert last == f"openrlhf-bapo: the whole output is in {tmp_path}/log"


def carried(error: BaseException) -> RayTaskError:
    """Wrap an error as Ray does on its way through two processes."""
    for place in ("ray::PPOTrainer.fit", "ray::PolicyModelActor.fit"):
        error = RayTaskError(place, f"Traceback ...\n{type(error).__name__}", error).as_instanceof_cause()
    return error


ARGS = {"ckpt.path": "ckpt", "ckpt.output_dir": "out", "logger.tensorboard_dir": None, "ckpt.save_steps": -1}
ARGS |= {"algo.advantage.estimator": "group_norm"}


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
        (
            ActorUnavailableError("The actor is temporarily unavailable: RpcError:\n reset by peer", None),
            "a Ray actor cannot be reached (RpcError: reset by peer): it died, or its node died or was cut off",
        ),
        (EngineDeadError(), "a rollout engine (vLLM's EngineCore) died; killed from outside"),
        (
            ActorDiedError(RayTaskError("__init__", "Traceback ...\nOSError: no such model", OSError("no such model"))),
            "a Ray actor, or its node's raylet, did not start: OSError: no such model",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_cause_is_one_line_whichever_process_it_comes_from(tmp_path, monkeypatch, error, said):
    monkeypatch.chdir(tmp_path)
    for one in (error, carried(error)):
        ended, saved = describe_failure(one, ARGS, [])
        assert ended.startswith(f"the run has ended: {said}") and "\n" not in ended
        assert saved.startswith("nothing is saved; the same command starts from the beginning (--ckpt.save_steps -1: ")
    assert describe_failure(error, ARGS, [15])[0].startswith(f"the run has ended: SIGTERM, {said}")


@pytest.mark.parametrize(
    ("steps", "every"),
    [(-1, "never, unless an evaluation is the best"), (float("inf"), "never, unless"), (20, "every 20 steps")],
)
def test_a_run_without_a_checkpoint_says_how_often_it_would_save_one(tmp_path, steps, every):
    args = ARGS | {"ckpt.path": str(tmp_path), "ckpt.save_steps": steps}  # OpenRLHF's parser makes inf of -1
    _, saved = describe_failure(KeyError("episode"), args, [])
    assert f"(--ckpt.save_steps {steps}: {every}" in saved


def test_a_full_disk_is_named_once_even_if_the_exception_does_not_name_it():
    # /proc never has space.
    args = ARGS | {"ckpt.path": "/proc/nowhere/ckpt", "ckpt.output_dir": "/proc/nowhere/model"}
    ended, _ = describe_failure(RuntimeError("iostream error"), args, [])
    assert ended == "the run has ended: RuntimeError: iostream error; the disk of /proc is full (0 bytes free)"
