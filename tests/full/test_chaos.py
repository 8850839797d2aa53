"""The problems that scripts/chaos.sh finds in records of steps as its trainer would write them."""

import copy
import signal
import subprocess
import time
from types import SimpleNamespace

import chaos
import psutil
import pytest
from patience import PATIENCE


def make_records(num_steps: int) -> list[dict]:
    """A run of so many steps, each of two prompts; one prompt is dropped in the second."""
    states = [{"version": n, "optimizer_steps": 2 * n, "pool": f"pool {n}"} for n in range(num_steps + 1)]
    return [
        {
            "step": n + 1,
            "prompts": [f"{n} a", f"{n} b"],
            "metrics": {"partial/started": 3.0 if n == 1 else 2.0, "partial/dropped": float(n == 1)},
            "before": states[n],
            "after": states[n + 1],
        }
        for n in range(num_steps)
    ]


PROMPTS = {f"{n} {name}" for n in range(9) for name in "abcd"}


def test_a_run_in_which_nothing_is_lost_is_accounted_for_with_what_waits_in_its_checkpoint():
    records = make_records(4)
    assert chaos.account(records, [], PROMPTS) == []
    records[-1]["metrics"]["partial/started"] += 1
    assert chaos.account(records, ["8 c"], PROMPTS) == []


def test_steps_that_were_made_again_after_a_resume_count_once_and_those_after_the_last_checkpoint_not_at_all():
    records = make_records(5)
    lost = copy.deepcopy(records[2:4])
    for record in lost:
        record["prompts"] = ["8 a", "8 b"]
    assert chaos.lineage(records[:2] + lost + records[2:], last_step=4) == records[:4]
    assert chaos.lineage(records[:2] + lost, last_step=2) == records[:2]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda records: records.pop(2), "steps [3] are missing"),
        (lambda records: records[3].update(prompts=["0 a", "3 b"]), "'0 a' was trained on 2 times"),
        (lambda records: records[3].update(prompts=["8 d", "3 b"]), "'8 d' was trained on, and waits"),
        (lambda records: records[3].update(prompts=["2+2", "3 b"]), "'2+2' is no prompt"),
        (
            lambda records: records[3].update(prompts=["3 b"]),
            "10 prompts were started; 7 were trained on, 1 dropped, 1 wait",
        ),
        (lambda records: records[2].update(before=records[1]["before"]), "step 3 began with"),
        (lambda records: [record["after"].update(version=9) for record in records[3:]], "step 4 has version 9"),
    ],
    ids=["a step", "twice", "waits", "unknown", "untrained", "other state", "version"],
)
def test_whatever_is_lost_or_twice_there_is_named(change, problem):
    records = make_records(4)
    records[3]["metrics"]["partial/started"] += 1
    assert chaos.account(records, ["8 d"], PROMPTS) == []
    change(records)
    assert any(found.startswith(problem) for found in chaos.account(records, ["8 d"], PROMPTS))


def test_an_end_that_nobody_explains_and_a_process_that_is_left_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(chaos, "LAST_PROCESS", 0)
    terminal, attempt = tmp_path / "terminal", chaos.Attempt("SIGTERM")
    terminal.write_text("step 1\nbye\n")
    run, left = subprocess.Popen(["true"]), psutil.Popen(["sleep", str(PATIENCE)])
    run.wait()
    while not left.cmdline():  # for a moment after its start a process has none
        time.sleep(0.01)
    chaos.Chaos.check_end(
        SimpleNamespace(place=chaos.Machine()), attempt, chaos.SIGTERM, run, terminal, {psutil.Process(left.pid)}
    )
    code, said, *_, process = attempt.problems
    assert (code, process) == ("exit code 0", f"left: {left.pid} sleep {PATIENCE}")
    assert said.startswith("the last lines do not say") and left.wait() == -signal.SIGKILL


def test_every_kind_of_fault_is_one_line_of_the_table():
    attempts = [chaos.Attempt(fault.name, 3, "1: the cause", 2.0, 2, 1) for fault in chaos.FAULTS]
    head, *rows = chaos.table(attempts).splitlines()
    assert len(rows) == len(chaos.FAULTS) and all("1: the cause" in row for row in rows)
    assert {len(row) for row in rows} == {len(head)}
