"""The example of TRL, as its README runs it."""

import subprocess
import sys

import pipeline

from openrlhf_bapo.cli.plot import read_scalars


def test_the_example_trains_a_policy_that_can_do_its_task_and_logs_what_is_drawn(tmp_path):
    command = [sys.executable, "examples/trl/train.py", "--runs", str(tmp_path), "--max_steps", "32"]
    run = subprocess.run(command, cwd=pipeline.REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    scalars = read_scalars(tmp_path / "bapo")
    assert all(0.3 < reward < 0.8 for reward in scalars["train/rollout/reward_mean"][1])
    assert len(set(scalars["train/bapo/clip_high"][1])) > 1
