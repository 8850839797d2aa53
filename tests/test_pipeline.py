"""The real thing end to end: OpenRLHF's Ray trainer, DeepSpeed actors and a vLLM engine, through our command."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pipeline
import pytest
import torch
from safetensors.torch import load_file

from openrlhf_bapo.cli.plot import read_scalars

TESTS = Path(__file__).parent


@pytest.fixture
def directory(tmp_path):
    return pipeline.make_model(tmp_path)


def test_bapo_with_two_data_parallel_ranks_trains_and_logs_its_metrics(directory):
    flags = pipeline.flags(
        directory,
        policy_loss="bapo",
        actor__num_gpus_per_node=2,
        actor__adam__lr=3e-3,
        train__micro_batch_size=4,  # 2 ranks x 4 samples x 4 micro-batches: 32 a step, 2 steps a rollout
        eval__at_start=True,
        eval__dataset=directory / "train.jsonl",
        eval__steps=2,
    )
    output = pipeline.train(directory, flags, "bapo")

    logged = pipeline.steps(output)
    assert len(logged) == 2
    for metrics in logged:
        assert 0.6 <= metrics["bapo/clip_low"] <= 0.9 and 1.2 <= metrics["bapo/clip_high"] <= 3.0
        assert 0 < metrics["bapo/positive_share"] < 1 and 0 < metrics["bapo/initial_share"] < 1
        assert 0 <= metrics["bapo/target_reached"] <= 1
        assert 0 <= metrics["bapo/clip_frac_positive"] <= 1 and 0 <= metrics["bapo/clip_frac_negative"] <= 1
        assert metrics["timing/bapo_ratio_forward"] > 0
        assert metrics["entropy_loss"] > 0 and metrics["actor_grad_norm"] > 0
    scalars = read_scalars(directory / "tensorboard")
    for name in ("clip_low", "clip_high", "positive_share", "initial_share", "target_reached"):
        assert scalars[f"train/bapo/{name}"][1] == pytest.approx([metrics[f"bapo/{name}"] for metrics in logged])
    assert scalars["eval/eval_sums_pass1"][0] == [0, 2]

    before, after = (load_file(directory / name / "model.safetensors") for name in ("model", "out"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    # The second rollout came from trained weights: its behaviour log-probs are those of the actor after two updates.
    assert logged[0]["entropy_loss"] != logged[1]["entropy_loss"]


def test_ppo_through_our_command_has_the_losses_of_openrlhfs_own(directory):
    # OpenRLHF's prompt order is not seeded, so all prompts are one and the same, and their responses scripted: every
    # order of the prompts makes the same rollouts.
    row = json.dumps({"input": "1+2=", "label": "", "datasource": "sums"}) + "\n"
    (directory / "train.jsonl").write_text(row * 12)
    flags = dict(
        train__agent_func_path=TESTS / "scripted_agent.py",
        reward__remote_url=None,
        actor__adam__lr=1e-2,
        actor__entropy_coef=0,
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=16,
        train__max_epochs=2,
    )
    ours = pipeline.train(directory, pipeline.flags(directory, policy_loss="ppo", **flags), "ours")
    upstream_command = (str(TESTS / "upstream_train.py"),)
    upstream = pipeline.train(directory, pipeline.flags(directory, **flags), "upstream", upstream_command)
    assert "bapo=namespace(" in ours and "bapo=namespace(" not in upstream  # it really was OpenRLHF's own command

    ours, upstream = pipeline.steps(ours), pipeline.steps(upstream)
    assert len(ours) == len(upstream) == 3
    for mine, theirs in zip(ours, upstream, strict=True):
        assert theirs["policy_loss"] != 0 and theirs["ppo_clip_ratio"] > 0
        assert without_timing(mine) == without_timing(theirs)


def without_timing(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("timing/")}


def test_it_runs_under_ray_job_submit_on_an_existing_cluster(directory):
    ray = Path(sys.executable).parent / "ray"
    gcs, dashboard = pipeline.free_port(), pipeline.free_port()
    head = [ray, "start", "--head", "--block", "--num-gpus=2", "--num-cpus=4", f"--port={gcs}"]
    head += [f"--dashboard-port={dashboard}", "--disable-usage-stats", "--include-dashboard=true"]
    # Sockets need short paths, and a cluster of our own its own folder.
    temporary = Path(f"/tmp/openrlhf-bapo-{gcs}")
    flags = pipeline.flags(directory, policy_loss="bapo", bapo__preset="released", bapo__positive_contribution_target=2)
    submit = [ray, "job", "submit", "--address", f"http://127.0.0.1:{dashboard}", "--"]
    submit += [sys.executable, "-m", "openrlhf_bapo.cli.train_ppo_ray", *flags]
    try:
        with pipeline.running([*head, f"--temp-dir={temporary}"], directory / "head.log") as process:
            wait_for_dashboard(dashboard, process)
            job = subprocess.run(submit, capture_output=True, text=True, timeout=300, env=without_ray_address())
            assert job.returncode == 0, job.stdout[-5000:] + job.stderr[-2000:]
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    metrics = pipeline.steps(job.stdout)
    assert len(metrics) == 2 and all("bapo/clip_high" in step for step in metrics)


def without_ray_address() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}


def wait_for_dashboard(port: int, process: subprocess.Popen) -> None:
    import time
    import urllib.error
    import urllib.request

    for _ in range(120):
        assert process.poll() is None, "ray start ended"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/version", timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError("the cluster's dashboard does not answer")
