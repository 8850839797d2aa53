"""The README's first command, as a newcomer runs it: the policy learns, the bounds move, the curves are drawn."""

import os
import subprocess
from pathlib import Path

import pipeline

from openrlhf_bapo.cli.plot import read_scalars


def test_the_quickstart_raises_held_out_accuracy_and_draws_moving_bounds(tmp_path):
    run = subprocess.run(
        ["bash", "scripts/train_bapo_quickstart.sh"],
        cwd=pipeline.REPOSITORY,
        env=os.environ | {"RUNS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    picture = Path(run.stdout.splitlines()[-1])
    assert picture.name == "curves.png" and picture.stat().st_size > 10_000
    scalars = read_scalars(picture.parent / "tensorboard")
    steps, accuracy = scalars["eval/eval_chain_sum_pass1"]
    assert steps[0] == 0 and 0.3 < accuracy[0] < 0.55
    assert accuracy[-1] > accuracy[0] + 0.05  # measured: 0.13 to 0.18 after 60 steps; one evaluation errs by 0.02
    upper = scalars["train/bapo/clip_high"][1]
    assert min(upper) >= 1.2 and max(upper) <= 3.0 and len(set(upper)) > 5
    assert len(run.stdout.splitlines()) < 80  # progress, and no wall of the frameworks' warnings
    assert (picture.parent / "model" / "model.safetensors").exists()
