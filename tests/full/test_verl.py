"""BAPO in verl, in verl's environment: its cases, a whole run, and the same tokens in OpenRLHF, TRL and verl."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pipeline
import presets
import pytest
import torch
from test_trl import arguments
from trl import GRPOTrainer

from openrlhf_bapo import BapoPolicyLoss, ClipConfig, find_clip_bounds
from openrlhf_bapo.cli import plot
from openrlhf_bapo.trl import BapoGRPOTrainer

SEARCH = ClipConfig(contribution="gradient", positive_contribution_target=0.35)  # as in verl_cases.py


@pytest.fixture(scope="module")
def tokens() -> dict[str, torch.Tensor]:
    """The tokens of 8 responses, each tensor [8, 12]; some ratios are far from 1."""
    generator = torch.Generator().manual_seed(0)
    log_probs = -2 * torch.rand(8, 12, generator=generator)
    mask = (torch.arange(12) < torch.randint(1, 13, (8, 1), generator=generator)).long()
    return dict(
        log_probs=log_probs,
        old_log_probs=log_probs + 0.5 * torch.randn(8, 12, generator=generator),
        advantages=(torch.randn(8, 1, generator=generator) - 0.4).expand(8, 12).contiguous(),
        mask=mask,
    )


@pytest.fixture(scope="module")
def programs():
    """The directory of verl's environment that has python in it."""
    subprocess.run(["bash", str(pipeline.REPOSITORY / "scripts/setup_framework.sh"), "verl"], check=True)
    return pipeline.REPOSITORY / ".venv-verl" / "bin"


@pytest.fixture(scope="module")
def in_verl(tokens, programs, tmp_path_factory):
    """The run of verl's cases; lower and upper bound and gradient [8, 12] of the tokens; and those by preset."""
    directory = tmp_path_factory.mktemp("verl")
    torch.save(tokens, directory / "tokens.pt")
    files = [directory / name for name in ("tokens.pt", "found.pt", "presets.pt")]
    command = [programs / "python", pipeline.SUPPORT / "verl_cases.py", *files]
    path = pipeline.python_path(pipeline.REPOSITORY / "examples/verl")
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment)
    return run, torch.load(files[1]), torch.load(files[2])


def test_verls_cases_pass_in_its_environment(in_verl):
    run, *_ = in_verl
    assert run.returncode == 0 and "skipped" not in run.stdout.splitlines()[-1], run.stdout[-20_000:]


def in_trl(directory, monkeypatch, log_probs, old_log_probs, advantages, mask):
    given = log_probs.clone().requires_grad_()
    policy = lambda *_, **__: (given, torch.zeros_like(given), None)  # noqa: E731
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", policy)
    overrides = dict(per_device_train_batch_size=8, steps_per_generation=1)
    trainer = BapoGRPOTrainer(**arguments(directory, **overrides), bapo=SEARCH)
    ids = torch.ones_like(mask)
    inputs = dict(prompt_ids=ids, prompt_mask=ids, completion_ids=ids, completion_mask=mask, advantages=advantages)
    inputs |= dict(old_per_token_logps=old_log_probs, num_items_in_batch=mask.sum())
    trainer._buffered_inputs, trainer.current_gradient_accumulation_steps = [inputs], 1
    trainer.get_batch_samples(iter([inputs]), 1, "cpu")
    trainer.model.train()
    trainer._compute_loss(trainer.model, inputs).backward()
    return float(1 - trainer.epsilon_low), float(1 + trainer.epsilon_high), given.grad


def in_openrlhf(log_probs, old_log_probs, advantages, mask):
    loss, log_probs = BapoPolicyLoss(clip_config=SEARCH), log_probs.clone().requires_grad_()
    loss(log_probs, old_log_probs, advantages, mask)[0].backward()
    bounds = loss.updates[0].used
    return bounds.lower.item(), bounds.upper.item(), log_probs.grad


def test_the_same_tokens_have_the_same_bounds_and_gradient_in_openrlhf_trl_and_verl(
    tokens, in_verl, tmp_path, monkeypatch
):
    directory = pipeline.make_model(tmp_path)
    ratio = (tokens["log_probs"] - tokens["old_log_probs"]).exp()
    bounds = find_clip_bounds(ratio, tokens["advantages"], tokens["mask"], SEARCH)
    assert bounds.initial_share < 0.35 <= bounds.positive_share  # somewhere on the path
    expected = in_openrlhf(**tokens)
    clipped = (expected[2] == 0) & (tokens["mask"] > 0)
    assert 0 < clipped.sum() < tokens["mask"].sum()
    for *found, gradient in (expected, in_trl(directory, monkeypatch, **tokens), in_verl[1]):
        assert found == pytest.approx([bounds.lower.item(), bounds.upper.item()], abs=1e-12)
        assert torch.allclose(gradient, expected[2], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_rule_has_the_plain_loops_bounds_and_gradient_in_verl(name, in_verl):
    presets.assert_same(in_verl[2][name], name)


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


def train(programs, directory, num_steps=4, **settings) -> tuple[str, list[dict[str, float]], Path]:
    """Run examples/verl/laptop.sh; return its output, the metrics of its steps, and its folder.

    The metrics are TensorBoard's, by the plot's names: Ray may cut a long line of the log in two.
    """
    run = pipeline.run_laptop(
        "verl",
        pipeline.warm_python(programs / "python", *IMPORTS),
        directory,
        f"trainer.total_training_steps={num_steps}",
        *(f"{name.replace('__', '.')}={value}" for name, value in settings.items()),
    )
    scalars = plot.read_scalars(run / "tensorboard")
    numbers = [*range(1, num_steps + 1)]
    assert scalars["training/global_step"][0] == numbers
    steps = [{tag: values[at.index(n)] for tag, (at, values) in scalars.items() if n in at} for n in numbers]
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


def test_verls_trainer_trains_with_a_rule_from_a_file(programs, tmp_path):
    rule = {"rule": "examples/my_rule.py:Sapo", "rule_settings": "{negative: 1.1}"}
    output, steps, _ = train(
        programs, tmp_path, 2, **{f"actor_rollout_ref.actor.policy_loss.{name}": value for name, value in rule.items()}
    )
    assert "my_rule.py:Sapo" in output
    for step in steps:
        assert step["train/bapo/positive_share"] > 0 and "train/bapo/clip_low" not in step


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
