"""The study's command: each cell runs once, what fails is said, and nothing of an ended run is left."""

import fcntl
import os
import subprocess
import sys
import time

import pytest
import torch
from test_late_data_study import FOLDER, walk


@pytest.fixture
def small_study(monkeypatch, tmp_path):
    """(flags of study.py, folder of results) of a study with two cells of one rollout, whose start is there already."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "late_data" / "starts").mkdir(parents=True)
    torch.save(
        walk.Policy(walk.TASKS["walk"]).state_dict(), tmp_path / "runs" / "late_data" / "starts" / "walk-seed3.pt"
    )
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
    return ["--study", str(tmp_path / "study.toml"), "--results", str(tmp_path / "results")], tmp_path / "results"


def run_study(*words: str):
    # It gives way to all others of its session, which may keep the cores busy.
    command = [sys.executable, str(FOLDER / "study.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, start_new_session=True)


def test_a_study_runs_each_cell_once_and_goes_on_where_it_was_broken_off(small_study):
    flags, results = small_study
    names = [f"walk-lag0-updates1-lr{lr}-ppo-seed3.csv" for lr in ("0.0001", "0.0002")]
    first = run_study("run", "--jobs", "2", *flags)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("2 of 2 cells to run")
    assert sorted(file.name for file in results.iterdir()) == names

    kept = (results / names[0]).stat().st_mtime_ns
    made = (results / names[1]).read_text()
    (results / names[1]).unlink()
    second = run_study("run", *flags)
    assert second.stdout.startswith("1 of 2 cells to run")
    assert (results / names[0]).stat().st_mtime_ns == kept
    assert (results / names[1]).read_text() == made
    assert run_study("run", *flags).stdout == "0 of 2 cells to run\n"


def test_a_cell_that_fails_is_reported_and_leaves_no_result(small_study):
    flags, results = small_study
    study_file = results.parent / "study.toml"
    study_file.write_text(study_file.read_text().replace('"ppo"]', '"ppo", "wrong"]'))
    run = run_study("run", "--cells", "*lr0.0001*", *flags)
    assert run.returncode == 1
    assert "wrong-seed3 FAILED" in run.stdout and "the bounds must satisfy 0 < ratio_lower_start" in run.stdout
    assert [file.name for file in results.iterdir()] == ["walk-lag0-updates1-lr0.0001-ppo-seed3.csv"]


def test_a_study_that_is_terminated_leaves_no_process_and_no_result(small_study):
    flags, results = small_study
    study_file = results.parent / "study.toml"
    study_file.write_text(study_file.read_text().replace("rollouts = 1,", "rollouts = 1000000,"))
    words = [sys.executable, str(FOLDER / "study.py"), "run", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(words, **pipes, start_new_session=True) as run:
        assert run.stdout.readline() == "2 of 2 cells to run\n"
        while not processes_with(f"--out {results}"):
            time.sleep(0.05)
        run.terminate()
        assert run.wait(60) == 1
    end = time.monotonic() + 60
    while left := processes_with(f"--out {results}"):  # for a moment after its end a process is still listed
        assert time.monotonic() < end, left
        time.sleep(0.05)
    assert not list(results.glob("*.csv"))


def processes_with(words: str) -> list[str]:
    found = subprocess.run(["pgrep", "-f", "--", words], capture_output=True, text=True)
    return found.stdout.split()


def test_two_runs_of_a_study_do_not_share_a_folder_of_results(small_study):
    flags, results = small_study
    results.mkdir()
    folder = os.open(results, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    run = run_study("run", *flags)
    os.close(folder)
    assert run.returncode == 1 and run.stderr == f"{results} is in use by another run\n"
