"""BAPO in verl, in verl's environment: its cases, a whole run, and the same tokens in OpenRLHF, TRL and verl."""

import json
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
    run = subprocess.run(command, capture_output=True, text=True, cwd=directory)
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


ON_A_CPU = {
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 2,
    "+ray_kwargs.ray_init.num_gpus": 2,
    "ray_kwargs.ray_init.num_cpus": 16,  # verl asks for more than the machine may have; they only count actors
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.model.use_remove_padding": False,  # needs flash attention
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "+actor_rollout_ref.rollout.enable_sleep_mode": False,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 16,
}
SMALL = {
    "trainer.total_training_steps": 4,
    "trainer.val_before_train": False,
    "data.train_batch_size": 16,
    "data.max_prompt_length": 8,
    "data.max_response_length": 8,
    "data.dataloader_num_workers": 0,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.rollout.max_model_len": 64,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "reward.num_workers": 1,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
}
TARGET = 0.56


README = (pipeline.REPOSITORY / "README.md").read_text()
DATA_COMMAND, TRAIN_COMMAND = re.findall(
    r"^(python examples/data_preprocess.*|bash examples/verl.*)$", README, re.MULTILINE
)


def make_verls_data(directory, data) -> None:
    """Our tiny model with what verl asks of a chat model's tokenizer, its prompts as verl's rows, a reward."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    pipeline.make_model(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.add_tokens(["\n"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(directory / "model")
    rows = [
        dict(
            data_source="sums",
            prompt=[dict(role="user", content=row["input"])],
            reward_model=dict(style="rule", ground_truth=row["label"]),
        )
        for row in map(json.loads, (directory / "train.jsonl").read_text().splitlines())
    ]
    data.mkdir(parents=True)
    for part in ("train", "test"):
        Dataset.from_list(rows).to_parquet(data / f"{part}.parquet")
    (directory / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return sum(c in '13579' for c in solution_str) / 8\n"
    )


IMPORTS = ("torch", "transformers", "tensordict", "vllm.v1.engine.async_llm", "vllm.v1.worker.cpu_worker")


def train(programs, directory, extra: dict[str, object]) -> tuple[str, list[dict[str, float]]]:
    """Run the README's command for verl with small settings and `extra`; its output, and the metrics of its steps."""
    folder = shlex.split(DATA_COMMAND, comments=True)[-1]  # under the home directory
    make_verls_data(directory, directory / folder.removeprefix("~/"))
    settings = ON_A_CPU | SMALL | {"reward.custom_reward_function.path": directory / "reward.py"}
    settings |= {"hydra.run.dir": directory / "hydra", "trainer.default_local_dir": directory / "checkpoints"}
    in_repository = ["bash", "-c", 'cd "$0" && exec "$@"', str(pipeline.REPOSITORY)]
    command = [*in_repository, *shlex.split(TRAIN_COMMAND, comments=True)]
    command += [f"{name}={value}" for name, value in (settings | extra).items()]
    warm = Path(pipeline.warm_python(programs / "python", *IMPORTS)).parent
    environment = dict(
        PATH=f"{warm}:{os.environ['PATH']}",
        PYTHONPATH=pipeline.python_path(pipeline.SUPPORT),
        VERL_USE_EXTERNAL_MODULES="verl_cpu",
        MODEL=str(directory / "model"),
        TENSORBOARD_DIR=str(directory / "tensorboard"),
        HOME=str(directory),
    )
    log = directory / "log"
    with pipeline.running(command, log, **environment) as process:
        code = process.wait(1500)
    output = log.read_text()
    assert code == 0, output[-5000:]
    lines = re.findall(r"step:\d+ - .*", output)
    steps = [dict(re.findall(r"(\S+?):(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)\)?(?: |$)", line)) for line in lines]
    return output, [{name: float(value) for name, value in step.items()} for step in steps]


def test_the_readmes_run_of_verls_trainer_learns_on_two_ranks_between_bounds_that_it_finds(programs, tmp_path):
    search = "+actor_rollout_ref.actor.policy_loss.search"
    searched = {f"{search}.contribution": "gradient", f"{search}.positive_contribution_target": TARGET}
    output, steps = train(programs, tmp_path, searched)
    assert "openrlhf-bapo: verl's policy loss is bapo, scope update" in output
    assert [step["training/global_step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step["training/rollout_probs_diff_mean"] < 0.01  # the engine has the weights that were trained
        assert 0.6 <= step["actor/bapo/clip_low"] <= 0.9 and 1.2 <= step["actor/bapo/clip_high"] <= 3.0
        assert step["actor/bapo/positive_share"] >= step["actor/bapo/initial_share"]
        assert step["actor/bapo/target_reached"] < 1 or step["actor/bapo/positive_share"] >= TARGET
    assert any(step["actor/bapo/clip_high"] > 1.2 for step in steps)  # and there was something to find
    assert steps[-1]["critic/score/mean"] > steps[0]["critic/score/mean"] + 0.1
    scalars = plot.read_scalars(tmp_path / "tensorboard")
    plot.draw({"verl": [scalars]}, TARGET, tmp_path / "curves.png")
    upper = [step["actor/bapo/clip_high"] for step in steps]
    assert scalars["train/bapo/clip_high"][1] == pytest.approx(upper, abs=1e-3)
    saved = tmp_path / "checkpoints" / "global_step_4" / "actor"  # save_freq, and the last step
    assert sorted(file.name for file in saved.glob("model_*.pt")) == [f"model_world_size_2_rank_{n}.pt" for n in (0, 1)]


ASYNC_WITH_CRITIC_AND_KL = {
    "trainer.v1.trainer_mode": "colocate_async",
    "algorithm.rollout_correction.bypass_mode": True,  # the ratio is against the engine's log-probs
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,  # one optimizer step per rollout
    "algorithm.adv_estimator": "gae",
    "critic.strategy": "fsdp2",
    "critic.ppo_micro_batch_size_per_gpu": 8,
    "critic.fsdp.use_torch_compile": False,
    "critic.model.use_remove_padding": False,
    "+critic.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.policy_loss.preset": "steady",
}


def test_verls_async_trainer_with_critic_and_kl_takes_ratios_against_the_policy_that_generated(programs, tmp_path):
    _, steps = train(programs, tmp_path, ASYNC_WITH_CRITIC_AND_KL | {"critic.model.path": tmp_path / "model"})
    assert [step["training/global_step"] for step in steps] == [1, 2, 3, 4]
    staleness = [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps]
    assert staleness[0] == 0 < max(staleness)
    for step, stale in zip(steps, staleness, strict=True):
        # The only optimizer step of a fresh rollout has ratios of 1, but for what engine and actor differ by.
        assert (step["actor/offpolicy/ess"] > 0.998) == (stale == 0)
        assert step["critic/vf_loss"] > 0 and "actor/kl_loss" in step
        assert 0.6 <= step["actor/bapo/clip_low"] < 1 < step["actor/bapo/clip_high"] <= 3.0
