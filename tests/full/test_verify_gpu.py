"""scripts/verify_gpu.sh: its stages as far as a CPU goes, and what becomes of a stage that fails or hangs."""

import contextlib
import json
import re
import subprocess
import sys
import time

import pipeline
import psutil
import pytest
from patience import PATIENCE
from torch.utils.tensorboard import SummaryWriter

sys.path.append(str(pipeline.REPOSITORY / "tools"))
import gpu_stages
import verify_gpu

from openrlhf_bapo.rules.clip_config import PRESETS
from openrlhf_bapo.rules.other_rules import RULES

SCRIPT = ["bash", str(pipeline.REPOSITORY / "scripts/verify_gpu.sh")]
# The other stages take the same way through the script as resume.
RUN_HERE = "versions,rules,adam,engine,shape_ppo,shape_bapo,resume,trl"


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The findings of the check by what was checked, and the page."""
    out = tmp_path_factory.mktemp("verify") / "out"
    run = pipeline.run_script("verify_gpu.sh", "--stages", RUN_HERE, "--out", str(out), tree=pipeline.warm_tree())
    page = (out / "report.md").read_text()
    assert run.returncode == 0, run.stdout + run.stderr + page
    findings = [json.loads(line) for line in (out / "findings.jsonl").read_text().splitlines()]
    assert not (out / "work").exists()  # what is left is small
    for name in ("resume", "shape_ppo"):  # the command would say that it sets the flag
        assert "--vllm.enforce_eager is" not in (out / f"{name}-run.log").read_text()
    assert all(f"- {finding['what']}: {finding['text']}" in page.splitlines() for finding in findings)
    return {finding["what"]: finding for finding in findings}


def test_what_needs_a_gpu_is_named_and_nothing_else_is_missing(checked):
    assert not [what for what, finding in checked.items() if finding["status"] == "wrong"]
    missing = {what for what, finding in checked.items() if finding["status"] == "not run"}
    of_shapes = {
        f"{method}: {what}"
        for method in ("ppo", "bapo")
        for what in ("memory", "plan of time for an H100", "the engine's sleep")
    }
    assert missing == {"flash-attn", "GPU", "GPU tests", "DeepSpeed's optimizer"} | of_shapes
    assert {f"{stage}, seconds" for stage in RUN_HERE.split(",")} < checked.keys()


def test_every_rule_is_compared_with_float64(checked):
    rules = {what for what in checked if what.startswith("rule ")}
    assert rules == {f"rule {name} on cpu" for name in ("fixed [0.8, 1.2]", *PRESETS, *RULES)}
    assert all(0 < checked[what]["figures"]["gradient"] < 1e-5 for what in rules)


def test_the_engine_is_compared_with_the_model_in_its_own_and_the_other_precision(checked):
    same, other = (
        checked[f"engine against {dtype} model, the quickstart's policy"] for dtype in ("float32", "bfloat16")
    )
    assert same["figures"]["mean"] < 1e-5 < other["figures"]["mean"] < 0.05


def test_a_run_learns_and_resumes(checked):
    assert checked["resume"]["text"].startswith("3 steps of ")
    assert checked["resumed"]["text"] == "trained the steps [4, 5], wanted [4, 5]"


@pytest.mark.parametrize("name", gpu_stages.QUICKSTARTS)
def test_the_flags_of_every_run_are_allowed_together(tmp_path, name):
    (tmp_path / "reward.py").touch()
    flags = [*gpu_stages.ONE_GPU, *gpu_stages.QUICKSTARTS[name][1]]
    of_task = dict(data__max_len=64, rollout__max_new_tokens=40, policy_loss="bapo")
    args = pipeline.parse([*pipeline.flags(tmp_path, **of_task), *flags])
    assert args.train.colocate_all and args.vllm.enable_sleep and args.ds.enable_sleep


@pytest.mark.parametrize("name, is_off_policy", [("resume", False), ("replay", True), ("budget", True)])
@pytest.mark.parametrize("num_steps, staleness", [(3, 2.0), (3, 0.0), (2, 2.0)])
def test_a_run_is_right_with_all_its_steps_and_old_samples_where_it_keeps_them(
    name, is_off_policy, num_steps, staleness
):
    logged = {
        "timing/step_total": [9.0, 1.0, 2.0][:num_steps],
        "offpolicy/engine_mismatch": [0.001, 0.002],
        "eval/eval_walk_pass1": [0.5, 0.8],
        "offpolicy/staleness_max": [0.0, staleness],
    }
    status, what, text = gpu_stages._describe_run(name, {f"train/{tag}": ([], logged[tag]) for tag in logged}, 3)
    assert (what, status == "right") == (name, num_steps == 3 and (staleness > 0 or not is_off_policy))
    old = f", staleness up to {staleness:.0f}" * is_off_policy
    said = "held-out accuracy 0.500 to 0.800, log-probs of engine and actor differ by at most 2.0e-03 on average"
    assert text == f"{num_steps} steps of {1.5 if num_steps == 3 else 1:.2f} s, {said}{old}"


def test_a_methods_phases_are_compared_with_ppos(checked):
    ppo, bapo = (checked[f"{method}: seconds"]["figures"]["seconds"] for method in ("ppo", "bapo"))
    assert f"ppo_train {bapo['ppo_train'] / ppo['ppo_train']:.2f}, step_total" in checked["bapo: seconds"]["text"]
    assert "against" not in checked["ppo: seconds"]["text"]
    planned = checked["ppo: plan of time for an H100"]
    assert 0 < planned["figures"]["planned"]["rollout"] < 1 and planned["text"].startswith("rollout 0.")


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """A function that runs the stage `trl`, whose process is the given program, and returns the finding."""

    def run(program: str, seconds: int = PATIENCE, left: float = PATIENCE) -> verify_gpu.Finding:
        (tmp_path / "program.py").write_text(program)
        monkeypatch.setattr(verify_gpu, "__file__", str(tmp_path / "program.py"))
        monkeypatch.setitem(verify_gpu.STAGES, "trl", verify_gpu.Stage("a text", seconds))
        page = verify_gpu.Page(tmp_path / "out")
        verify_gpu.Runner(page, [], time.monotonic() + left, 1).run("trl")
        (finding,) = page.findings()
        return finding

    return run


def test_a_stage_that_hangs_is_ended_with_its_processes(runner, tmp_path, monkeypatch):
    monkeypatch.setattr(verify_gpu, "LEAST_SECONDS", 0)
    program = f"""
import subprocess, sys, time
child = subprocess.Popen(["sleep", "{PATIENCE}"], start_new_session=True)
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep({PATIENCE})
"""
    finding = runner(program, seconds=3)
    assert finding.status == "wrong" and finding.text.startswith("ended after its 3 s; the last lines are in ")
    if (tmp_path / "child").exists() and (child := (tmp_path / "child").read_text()):  # not on a very slow machine
        with contextlib.suppress(psutil.NoSuchProcess):
            while psutil.Process(int(child)).status() != psutil.STATUS_ZOMBIE:  # it has got its SIGKILL
                time.sleep(0.1)


def test_a_stage_that_fails_is_wrong_with_its_last_line(runner):
    finding = runner("import sys; sys.exit('no such model')")
    assert finding.status == "wrong" and finding.text.startswith("exit code 1: no such model (")


def test_a_stage_for_which_no_time_is_left_does_not_start(runner):
    finding = runner("raise SystemExit(1)", left=29)
    assert finding.status == "not run" and re.fullmatch(r"a text; --minutes left -?\d+ s for it", finding.text)


def test_a_fallback_that_helps_is_kept_and_one_that_does_not_is_forgotten(tmp_path, monkeypatch):
    program = "import os, sys; sys.exit('HELPS' not in os.environ or 'HARMS' in os.environ)"
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(verify_gpu, "__file__", str(tmp_path / "program.py"))
    fallbacks = {"versions": {}, "engine": {"HARMS": "1"}, "rules": {"HELPS": "1"}, "trl": {}}
    page = verify_gpu.Page(tmp_path / "out")
    runner = verify_gpu.Runner(page, [], time.monotonic() + PATIENCE, 1)
    for name, fallback in fallbacks.items():
        monkeypatch.setitem(verify_gpu.STAGES, name, verify_gpu.Stage("a text", PATIENCE, fallback=fallback))
        runner.run(name)
    found = [(finding.status, finding.what) for finding in page.findings()]
    assert found[:4] == [("wrong", "versions"), ("wrong", "engine"), ("wrong", "engine"), ("wrong", "rules")]
    assert found[4:] == [("right", "rules, seconds"), ("right", "rules, fallback"), ("right", "trl, seconds")]
    assert "- rules, fallback: succeeds with HELPS=1, " in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize("message, is_repeated", [("Error in memory profiling.", True), ("no such model", False)])
def test_a_run_is_repeated_only_if_another_run_disturbed_it(tmp_path, message, is_repeated):
    program = f"""
import os, sys
if not os.path.exists("{tmp_path}/tried"):
    open("{tmp_path}/tried", "w").close()
    sys.exit({message!r})
print("done")
"""
    page = verify_gpu.Page(tmp_path / "out")
    output = gpu_stages.run_logged(page, "replay", [sys.executable, "-c", program])
    assert output == ("done\n" if is_repeated else None)
    assert [finding.status for finding in page.findings()] == ([] if is_repeated else ["wrong"])


def test_the_engines_sleep_is_read_from_the_output_of_a_run(tmp_path):
    page = verify_gpu.Page(tmp_path / "out")
    lines = ["It took 0.25 seconds to fall asleep.", "It took 0.1 seconds to wake up tags ['weights'].", "It took"]
    gpu_stages._describe_sleep(page, "ppo", "\n".join([*lines, lines[0].replace("0.25", "0.75")]))
    assert page.findings()[0].text == "0.50 s to fall asleep, 0.10 s to wake up"


def test_after_sigterm_the_page_has_what_was_found_and_no_process_goes_on(tmp_path):
    with pipeline.running(
        [*SCRIPT, "--stages", "versions,ppo", "--out", str(tmp_path / "out")], tmp_path / "log"
    ) as run:
        pipeline.wait_until((tmp_path / "out/ppo-run.log").exists, run, tmp_path / "log")
        family = psutil.Process(run.pid).children(recursive=True)
        run.terminate()
        assert run.wait() == 143
    psutil.wait_procs(family)
    page = (tmp_path / "out/report.md").read_text()
    assert "- the check: ended by SIGTERM" in page and "- torch: " in page
    assert not (tmp_path / "out/work").exists()


def test_memory_is_that_of_the_phase_in_which_it_was_used(tmp_path):
    with SummaryWriter(tmp_path) as writer:
        for step, end in ((1, 100.0), (2, 200.0)):
            for phase, seconds in zip(gpu_stages.PHASES, (40, 30, 20, 10), strict=True):
                writer.add_scalar(f"train/timing/{phase}", seconds, step, walltime=end)
            writer.add_scalar("train/timing/step_total", 100, step, walltime=end)
    samples = [(50.0, 99.0), (120.0, 1.0), (150.0, 2.0), (165.0, 2.5), (180.0, 3.0), (195.0, 4.0), (300.0, 99.0)]
    found = gpu_stages._memory_by_phase(tmp_path, samples)
    assert found == {"generation": 1.0, "make_experience": 2.5, "ppo_train": 3.0, "broadcast": 4.0}


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--out", "."], "--out .: exists"),
        (["--stages", "ppo,gpus"], "--stages gpus: allowed: versions, "),
        (["--minutes", "0"], "--minutes 0.0: allowed: 0.5 or more"),
        (["--jobs", "0"], "--jobs 0: allowed: 1 or more"),
    ],
)
def test_a_wrong_flag_ends_in_one_line(flags, said):
    run = subprocess.run([*SCRIPT, *flags], capture_output=True, text=True)
    assert run.returncode == 2 and said in run.stderr and len(run.stderr.splitlines()) == 1
