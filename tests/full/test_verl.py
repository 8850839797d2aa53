"""BAPO in verl, in verl's environment: its cases, and whole runs."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pipeline
import pytest

from openrlhf_bapo.cli import plot


@pytest.fixture(scope="module")
def programs():
    return pipeline.framework_programs("verl")


def test_verls_cases_pass_in_its_environment(programs, tmp_path):
    path = pipeline.python_path(pipeline.REPOSITORY / "examples/verl")
    pipeline.assert_cases_pass("verl", programs, tmp_path / "log", path)


TARGET = 0.56  # laptop.sh's
README = (pipeline.REPOSITORY / "README.md").read_text()
DATA_COMMAND, TRAIN_COMMAND = re.findall(
    r"^(python examples/data_preprocess.*|bash examples/verl.*)$", README, re.MULTILINE
)


def test_the_readmes_training_command_reads_what_its_data_command_writes(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/me"}
    command = shlex.split(TRAIN_COMMAND, comments=True)
    given = subprocess.run(command, cwd=pipeline.REPOSITORY, env=environment, capture_output=True, text=True)
    folder = shlex.split(DATA_COMMAND, comments=True)[-1].replace("~", "/home/me")
    assert f"data.train_files={folder}/train.parquet" in given.stdout.splitlines()
    assert TRAIN_COMMAND.partition(" #")[0].rstrip() in (pipeline.REPOSITORY / "examples/verl/laptop.sh").read_text()


IMPORTS = ("torch", "transformers", "tensordict", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker")


def train(programs, directory, **settings) -> tuple[str, list[dict[str, float]], Path]:
    """Run examples/verl/laptop.sh for four steps; return its output, the metrics of its steps, and its folder.

    The metrics are TensorBoard's, by the plot's names: Ray may cut a long line of the log in two.
    """
    run = pipeline.run_laptop(
        "verl",
        pipeline.warm_python(programs / "python", *IMPORTS),
        directory,
        "trainer.total_training_steps=4",
        *(f"{name.replace('__', '.')}={value}" for name, value in settings.items()),
    )
    scalars = plot.read_scalars(run / "tensorboard")
    assert scalars["training/global_step"][0] == [1, 2, 3, 4]
    steps = [{tag: values[at.index(n)] for tag, (at, values) in scalars.items() if n in at} for n in (1, 2, 3, 4)]
    return (run / "train.log").read_text(), steps, run


def test_verls_trainer_learns_on_two_ranks_between_bounds_that_it_finds(programs, tmp_path):
    output, steps, run = train(programs, tmp_path)
    assert "openrlhf-bapo: verl's policy loss is bapo, scope update" in output
    for step in steps:
        assert step["training/rollout_probs_diff_mean"] < 0.01  # the engine has the weights that were trained
        assert 0.6 <= step["train/bapo/clip_low"] <= 0.9 and 1.2 <= step["train/bapo/clip_high"] <= 3.0
        assert step["train/bapo/positive_share"] >= step["train/bapo/initial_share"]
        reached = step["train/bapo/target_reached"] == 1
        assert not reached or step["train/bapo/positive_share"] >= TARGET - 1e-6  # float32
    assert any(step["train/bapo/clip_high"] > 1.21 for step in steps)  # and there was something to find
    assert steps[-1]["train/rollout/reward_mean"] > steps[0]["train/rollout/reward_mean"] + 0.1
    saved = run / "checkpoints" / "global_step_4" / "actor"  # save_freq, and the last step
    assert sorted(file.name for file in saved.glob("model_*.pt")) == [f"model_world_size_2_rank_{n}.pt" for n in (0, 1)]


ASYNC = {
    "algorithm.rollout_correction.bypass_mode": True,  # the ratio is against the engine's log-probs
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,  # one optimizer step per rollout
    "actor_rollout_ref.actor.policy_loss.preset": "steady",
}
CRITIC_AND_KL = {
    "algorithm.adv_estimator": "gae",
    "critic.strategy": "fsdp2",
    "critic.ppo_micro_batch_size_per_gpu": 8,
    "critic.fsdp.use_torch_compile": False,
    "critic.model.path": "${actor_rollout_ref.model.path}",
    "critic.model.use_remove_padding": False,
    "actor_rollout_ref.actor.use_kl_loss": True,
}
# Trainer and engine are apart, as in verl's fully asynchronous trainer.
APART = {
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "file",  # examples/verl/verl_cpu.py
    "trainer.v1.separate_async.parameter_sync_step": 1,
    "ray_kwargs.ray_init.num_gpus": 3,
}


@pytest.mark.parametrize(("mode", "settings"), [("colocate_async", CRITIC_AND_KL), ("separate_async", APART)])
def test_verls_async_trainers_take_ratios_against_the_policy_that_generated(
    mode, settings, programs, tmp_path, monkeypatch
):
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "WARN")  # an INFO line of verl 0.9.1's separate_async raises
    _, steps, _ = train(programs, tmp_path, **{"trainer.v1.trainer_mode": mode}, **ASYNC, **settings)
    staleness = [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps]
    assert staleness[0] == 0 < max(staleness)
    assert min(step["train/offpolicy/ess"] for step in steps) < 0.998
    for step, stale in zip(steps, staleness, strict=True):
        # The only optimizer step of a fresh rollout has ratios of 1, but for what engine and actor differ by.
        assert stale > 0 or step["train/offpolicy/ess"] > 0.998
        assert 0.6 <= step["train/bapo/clip_low"] < 1 < step["train/bapo/clip_high"] <= 3.0
        if settings is CRITIC_AND_KL:
            assert step["critic/vf_loss"] > 0 and "actor/kl_loss" in step
