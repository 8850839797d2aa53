"""The study's command: it runs each cell once, reports failures, and leaves no process and no partial result."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import study
import torch
import walk


@pytest.fixture
def small_study(monkeypatch, tmp_path):
    """Return (flags of study.py, its runs folder) for two cells of one rollout, whose start policy exists already."""
    monkeypatch.chdir(tmp_path)
    starts = tmp_path / "runs" / "late_data" / "starts"
    starts.mkdir(parents=True)
    torch.save(walk.Policy(walk.TASKS["walk"]).state_dict(), starts / "walk-seed3.pt")
    (tmp_path / "study.toml").write_text(
        """
        [methods]
        ppo = { clip = "ppo", rollouts = 1, prompts = 1, samples = 2 }
        wrong = { clip = "3:4", rollouts = 1, prompts = 1, samples = 2 }
        [[block]]
        task = ["walk"]
        lag = [0]
        updates = [1]
        lr = [1e-4, 2e-4]
        seed = [3]
        method = ["ppo"]
        """
    )
    files = {"--study": "study.toml", "--results": "results.parquet", "--runs": "runs/cells"}
    return [word for flag, file in files.items() for word in (flag, str(tmp_path / file))], tmp_path / "runs" / "cells"


def run_study(*words: str):
    # In a new session, because `run` is nice: it would starve beside busy processes of this one.
    command = [sys.executable, study.__file__, *words]
    return subprocess.run(command, capture_output=True, text=True, start_new_session=True)


def test_a_study_runs_each_cell_once_an_interrupted_one_continues_and_added_cells_need_no_csv(small_study):
    flags, runs = small_study
    names = [f"walk-lag0-updates1-lr{lr}-ppo-seed3.csv" for lr in ("0.0001", "0.0002")]
    first = run_study("run", "--jobs", "2", *flags)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("2 of 2 cells to run")
    assert sorted(file.name for file in runs.iterdir()) == names

    kept = (runs / names[0]).stat().st_mtime_ns
    made = (runs / names[1]).read_text()
    (runs / names[1]).unlink()
    assert run_study("run", *flags).stdout.startswith("1 of 2 cells to run")
    assert (runs / names[0]).stat().st_mtime_ns == kept
    assert (runs / names[1]).read_text() == made

    table = run_study("table", *flags).stdout
    assert "| ppo | " in table
    assert run_study("add", *flags).stdout == f"2 cells added to {flags[3]}\n"
    for file in runs.iterdir():
        file.unlink()
    assert run_study("table", *flags).stdout == table
    assert run_study("run", *flags).stdout == "0 of 2 cells to run\n"


def test_a_cell_that_fails_is_reported_and_leaves_no_result(small_study):
    flags, runs = small_study
    change_study(flags, '"ppo"]', '"ppo", "wrong"]')
    run = run_study("run", "--cells", "*lr0.0001*", *flags)
    assert run.returncode == 1
    assert (
        "wrong-seed3 FAILED" in run.stdout
        and "bounds 3, 4 are not allowed; they must satisfy lower <= 1 <= upper" in run.stdout
    )
    assert [file.name for file in runs.iterdir()] == ["walk-lag0-updates1-lr0.0001-ppo-seed3.csv"]


def change_study(flags: list[str], old: str, new: str):
    file = Path(flags[1])
    file.write_text(file.read_text().replace(old, new))


def test_a_study_that_is_terminated_leaves_no_process_and_no_result(small_study):
    flags, runs = small_study
    change_study(flags, "rollouts = 1,", "rollouts = 1000000,")
    words = [sys.executable, study.__file__, "run", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(words, **pipes, start_new_session=True) as run:
        assert run.stdout.readline() == "2 of 2 cells to run\n"
        while not processes_with(f"--out {runs}"):
            time.sleep(0.05)
        run.terminate()
        assert run.wait() == 1
    while processes_with(f"--out {runs}"):  # a process is listed for a moment after its end
        time.sleep(0.05)
    assert not list(runs.glob("*.csv"))


def processes_with(words: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", "--", words], capture_output=True, text=True)
    return found.stdout.split()


@pytest.mark.parametrize("command", ["run", "add"])
def test_only_one_process_at_a_time_runs_or_adds_cells_of_a_runs_folder(small_study, command):
    flags, runs = small_study
    runs.mkdir(parents=True)
    folder = os.open(runs, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    run = run_study(command, *flags)
    os.close(folder)
    assert run.returncode == 1 and run.stderr.startswith(f"{runs} is in use by another process of this study")
