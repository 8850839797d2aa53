"""The decoupled objective and OpenRLHF as it comes on stale data: denominators, weights, and metrics of real runs."""

import subprocess

import partial
import pipeline
import pytest
import recordings
import replay
import torch
from pyarrow import parquet
from safetensors.torch import load_file


def method(name: str) -> list[str]:
    """The flags that scripts/method.sh has for a METHOD."""
    command = f'METHOD={name}; source scripts/method.sh; printf "%s\\n" "${{METHOD_FLAGS[@]}}"'
    run = subprocess.run(["bash", "-c", command], cwd=pipeline.REPOSITORY, capture_output=True, text=True, check=True)
    return run.stdout.split()


def recorded(directory, flags: list[str], tapered: bool = False) -> tuple[str, dict[str, torch.Tensor]]:
    """Train; return the output and the batch of all samples, whose ratios are against the training step's start."""
    output = pipeline.train(directory, flags, "run", **recordings.environment(directory / "recording"))
    batch = recordings.trained_on(directory / "recording")
    policies = recordings.Policies(directory / "model", directory / "recording")
    recordings.assert_ratios_are_against_the_policy_that_training_started_from(batch, policies, 2, tapered)
    return output, batch


def correction(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["denominators"] - batch["rollout_log_probs"]).exp()


@pytest.mark.parametrize(
    ("name", "stale"), [("stock", replay.ASYNC), ("stock_is", dict(offpolicy__lag=2))], ids=["async", "lag"]
)
def test_stock_methods_train_stale_data_against_recomputed_log_probs_and_say_so(tmp_path, name, stale):
    directory = pipeline.make_model(tmp_path, num_prompts=96)
    sizes = dict(data__max_samples=96, actor__adam__lr=3e-4, train__micro_batch_size=16)
    output, batch = recorded(directory, [*method(name), *pipeline.flags(directory, **sizes | stale)])
    steps = pipeline.steps(output)
    source = "--offpolicy.lag 2" if "offpolicy__lag" in stale else "--train.async_enable"
    assert output.count(f"the ratio does not see the staleness of {source}; ") == 1
    assert len(steps) == 6 and max(step["offpolicy/staleness_max"] for step in steps) >= 1
    assert [step["bapo/clip_low"] for step in steps] + [step["bapo/clip_high"] for step in steps] == [0.8] * 6 + [
        1.2
    ] * 6
    weights = correction(batch)
    if name == "stock":
        weights = torch.ones_like(weights)
    else:
        assert any(step["is_filter_ratio"] > 0 for step in steps)
        weights = torch.where((weights >= 0.5) & (weights <= 5), weights, 0.0)
    recordings.assert_losses_are_weighted(batch, weights, steps, num_first=2)


REPLAY = dict(replay__ratio=1, replay__max_staleness=4, replay__max_reuse=1)


@pytest.mark.parametrize("stale", [partial.ASYNC, REPLAY], ids=["async", "replay"])
def test_decoupled_under_a_token_budget_takes_the_training_steps_start_for_tokens_of_every_version(tmp_path, stale):
    directory = partial.make_model(tmp_path)
    flags = partial.flags(directory, partial__oversample=2, offpolicy__objective="decoupled", **stale)
    output, batch = recorded(directory, flags)
    assert max(partial.num_versions(batch)) >= 2
    recordings.assert_losses_are_weighted(batch, correction(batch).clamp(max=2), pipeline.steps(output), num_first=2)


TAPERED = dict(offpolicy__objective="decoupled", offpolicy__weight="tapered")


def tapered(batch: dict[str, torch.Tensor], level: str) -> torch.Tensor:
    log_s = batch["denominators"] - batch["rollout_log_probs"]
    if level == "sequence":
        log_s = (log_s * batch["action_mask"]).sum(-1, keepdim=True).expand_as(log_s)
    return torch.where(batch["loss_advantages"] > 0, 1.0, log_s.exp().clamp(max=1))


@pytest.mark.parametrize(
    ("stale", "level", "policy_loss"),
    [(partial.ASYNC, "sequence", "ppo"), (REPLAY, "token", "bapo")],
    ids=["async", "replay"],
)
def test_tapered_under_a_token_budget_weighs_stale_tokens_alone(tmp_path, stale, level, policy_loss):
    directory = partial.make_model(tmp_path)
    weight = TAPERED | dict(offpolicy__weight_level=level)
    flags = partial.flags(
        directory, partial__oversample=2, policy_loss=policy_loss, bapo__dump_tokens=1, **weight, **stale
    )
    output, batch = recorded(directory, flags, tapered=True)
    weights, steps = tapered(batch, level), pipeline.steps(output)
    recordings.assert_losses_are_weighted(batch, weights, steps, num_first=2)
    for version, step in zip(batch["version"].unique().tolist(), steps, strict=True):
        negative = (batch["version"] == version)[:, None] & (batch["action_mask"] > 0) & (batch["loss_advantages"] < 0)
        assert step["offpolicy/weight_negative"] == pytest.approx(float(weights[negative].double().mean()), abs=1e-5)
        dumped = parquet.read_table(directory / f"tensorboard/tokens/step_{version + 1:06d}_rank0.parquet")
        is_token = (batch["version"] == version)[:, None] & (batch["action_mask"] > 0)
        s = (batch["denominators"] - batch["rollout_log_probs"]).exp()
        for name, expected in (("weight", weights), ("start_over_behavior", s)):
            found = torch.tensor(dumped[name].to_numpy())
            torch.testing.assert_close(found, expected[is_token].float(), rtol=1e-5, atol=1e-6)
    assert min(step["offpolicy/weight_negative"] for step in steps) < 0.999


@pytest.mark.parametrize("method", [dict(policy_loss="ppo"), dict(policy_loss="bapo", bapo__preset="paper")], ids=str)
def test_on_fresh_data_a_tapered_run_is_the_plain_one_to_the_bit(tmp_path, method):
    directory = pipeline.make_model(tmp_path, num_prompts=32)
    trained = []
    for name, weight in {"plain": {}, "tapered": TAPERED}.items():
        where = dict(ckpt__output_dir=str(tmp_path / name), train__full_determinism_enable=True)
        flags = dict(data__max_samples=32, actor__adam__lr=1e-3)
        pipeline.train(directory, pipeline.flags(directory, **flags | where | method | weight), name)
        trained.append(load_file(tmp_path / name / "model.safetensors"))
    plain, tapered = trained
    assert plain.keys() == tapered.keys() and all(torch.equal(plain[name], tapered[name]) for name in plain)
