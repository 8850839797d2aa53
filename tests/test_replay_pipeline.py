"""Old tokens through the real pipeline: the policy that a ratio is taken against, staleness, replay and resuming."""

import os
import shutil
import signal
import sys

import pipeline
import pytest
import recordings
import torch

from openrlhf_bapo.adapter.flags import replay_config_from_args
from openrlhf_bapo.adapter.replay_checkpoint import load_saved_pool, load_steady_bounds, pool_directory


@pytest.fixture
def directory(tmp_path):
    return pipeline.make_model(tmp_path, num_prompts=160)


def replay_flags(directory, **overrides) -> list[str]:
    """Ten global steps of 16 fresh groups of 4 and as many replayed ones; two micro-batches an optimizer step."""
    flags = dict(
        policy_loss="bapo",
        data__max_samples=160,
        actor__adam__lr=3e-4,
        train__micro_batch_size=16,
        replay__ratio=1,
        replay__max_staleness=4,
        replay__max_reuse=2,
    )
    return pipeline.flags(directory, **flags | overrides)


def test_flags_fill_the_pools_settings(tmp_path):
    (tmp_path / "reward.py").touch()
    config = replay_config_from_args(pipeline.parse(replay_flags(tmp_path, replay__strategy="advantage")).replay)
    assert (config.ratio, config.max_staleness, config.max_reuse, config.strategy) == (1.0, 4, 2, "advantage")


ASYNC = dict(data__max_len=72, rollout__max_new_tokens=64, train__async_enable=True, train__async_queue_size=2)


@pytest.mark.pipeline
def test_async_ratios_of_fresh_and_replayed_tokens_are_against_the_weights_that_generated_them(directory):
    recorder = recordings.environment(directory / "recording")
    steps = pipeline.steps(pipeline.train(directory, replay_flags(directory, **ASYNC), "async", **recorder))
    assert len(steps) == 10
    assert all(step["offpolicy/mixed_versions"] == 0 for step in steps)
    batch = recordings.trained_on(directory / "recording")
    policies = recordings.Policies(directory / "model", directory / "recording")
    recordings.assert_ratios_are_against_the_policy_that_generated(batch, policies, sampled=True, num_first=2)
    counted = recordings.steps_by_version(batch, num_first=2)
    recordings.assert_optimizer_steps_are_counted(batch, steps, 2, counted)
    # More of them are stale than were replayed: fresh ones too, generated while the rollout before was trained on.
    num_stale = batch["version"][batch["staleness"].amax(-1) > 0].bincount(minlength=10).tolist()
    assert any(stale > 4 * step["replay/groups_sampled"] for stale, step in zip(num_stale, steps, strict=True))


@pytest.mark.pipeline
def test_on_two_ranks_a_response_that_a_weight_update_fell_into_has_ratios_against_both_versions(directory):
    recorder = recordings.environment(directory / "recording") | {"RECORDING_MIXED": "1"}
    partial = dict(train__partial_rollout_enable=True, actor__num_gpus_per_node=2, data__max_samples=96)
    flags = replay_flags(directory, **ASYNC, **partial)
    steps = pipeline.steps(pipeline.train(directory, flags, "mixed", **recorder))
    assert len(steps) == 6
    batch = recordings.trained_on(directory / "recording")
    policies = recordings.Policies(directory / "model", directory / "recording")
    recordings.assert_ratios_are_against_the_policy_that_generated(batch, policies, sampled=True, num_first=1)
    recordings.assert_optimizer_steps_are_counted(batch, steps, 1, recordings.steps_by_version(batch, num_first=1))
    mask = batch["action_mask"] > 0
    oldest, newest = batch["versions"].masked_fill(~mask, 99).amin(-1), batch["versions"].amax(-1)
    mixed = oldest < newest
    assert sum(step["offpolicy/mixed_versions"] * 64 for step in steps) > 0
    assert mixed.any() and (newest - oldest).max() == 1


@pytest.mark.pipeline
def test_with_gae_and_the_engines_log_probs_replayed_samples_come_back_as_they_were_made(directory):
    flags = replay_flags(
        directory,
        algo__advantage__estimator="gae",
        critic__adam__lr=1e-3,
        offpolicy__ratio_base="rollout",
        data__max_samples=128,
    )
    recorder = recordings.environment(directory / "recording")
    steps = pipeline.steps(pipeline.train(directory, flags, "gae", **recorder))
    assert len(steps) == 8
    pipeline.assert_rewards_rise(steps)
    assert steps[-1]["critic_loss"] > 0
    batch = recordings.trained_on(directory / "recording")
    policies = recordings.Policies(directory / "model", directory / "recording")
    recordings.assert_ratios_are_against_the_policy_that_generated(batch, policies, sampled=True, num_first=2)

    of_critic = recordings.trained_on(directory / "recording", "critic")
    for of_model, names in ((batch, ("advantages", "returns", "values")), (of_critic, ("returns", "values"))):
        fresh, replayed = {}, []
        for i, (version, staleness) in enumerate(zip(of_model["version"], of_model["staleness"].amax(-1), strict=True)):
            made = int(version - staleness), tuple(of_model["sequences"][i][of_model["attention_mask"][i] > 0].tolist())
            numbers = torch.stack([of_model[name][i][of_model["action_mask"][i] > 0] for name in names])
            if staleness == 0:
                fresh[made] = numbers
            else:
                replayed.append((made, numbers))
        assert len(replayed) > 200
        assert all(torch.equal(fresh[made], numbers) for made, numbers in replayed)


@pytest.mark.pipeline
def test_a_killed_run_resumes_with_its_pool_and_trains_on_what_it_would_have_drawn(directory, capsys):
    # The rewards of the sixth rollout do not come before the kill.
    waiting = directory / "waiting"
    waiting.touch()
    with open(directory / "reward.py", "a") as file:
        file.write(
            "\n\nimport itertools, os, time\n\ncalls, odd_digits = itertools.count(), reward_func\n\n\n"
            "def reward_func(queries, prompts, labels, **kwargs):\n"
            f"    while next(calls) >= 5 * 64 and os.path.exists({str(waiting)!r}):\n"
            "        time.sleep(0.2)\n"
            "    return odd_digits(queries, prompts, labels, **kwargs)\n"
        )
    flags = replay_flags(directory, ckpt__save_steps=2, ckpt__max_num=2, bapo__smoothing=3)
    command = [sys.executable, "-m", "openrlhf_bapo.cli.train_ppo_ray", *flags]
    log = directory / "killed.log"
    with pipeline.running(command, log, **recordings.environment(directory / "killed")) as process:
        pipeline.wait_until(lambda: "Global step 5" in log.read_text(), process, log)
        os.killpg(process.pid, signal.SIGKILL)
    waiting.unlink()
    shutil.rmtree(directory / "ckpt/_replay/global_step4")  # the checkpoint before it is whole

    # Bounds that no longer follow show which ones the run goes on with.
    resume = [*flags, "--ckpt.load_enable", "--bapo.smoothing", "1e12"]
    args = pipeline.parse(resume)
    assert args.ckpt.resume_from == "global_step2" and "resumes global_step2, because" in capsys.readouterr().err
    pool, state = load_saved_pool(args, args.ckpt.resume_from)
    version = state["policy_version"]
    assert version == 2 and len(pool) >= 8
    pool.sample(0, version)
    num_groups = min(16, len(pool)) // 8 * 8  # whole optimizer steps of 32 samples
    drawn = [sample for group in pool.sample(num_groups, version) for sample in group.samples]

    steady = load_steady_bounds(args, args.ckpt.resume_from)
    bounds = {"low": float(steady["lower"]), "high": float(steady["upper"])}
    assert abs(bounds["low"] - 0.75) > 0.01 < abs(bounds["high"] - 2.1)  # two steps have moved them

    # The first broadcast is that of the resumed weights.
    recorder = recordings.environment(directory / "resumed", start=version - 1)
    first, *_, last = steps = pipeline.steps(pipeline.train(directory, resume, "resumed", **recorder))
    assert len(steps) == 8  # 3 to 10
    assert first["replay/groups_sampled"] * 4 == len(drawn) > 0
    assert last["offpolicy/staleness_max"] <= 4
    for name, bound in bounds.items():
        assert [step[f"bapo/clip_{name}"] for step in steps] == pytest.approx([bound] * 8, abs=1e-6)
    folders, counted = [directory / "killed", directory / "resumed"], {}
    for i, logged in enumerate([pipeline.steps(log.read_text()), steps]):
        batch = recordings.trained_on(folders[i])
        policies = recordings.Policies(directory / "model", *folders[: i + 1])
        recordings.assert_ratios_are_against_the_policy_that_generated(batch, policies, sampled=False, num_first=2)
        counted |= recordings.steps_by_version(batch, num_first=2)
        recordings.assert_optimizer_steps_are_counted(batch, logged, 2, counted)
    trained = zip(*(batch[name] for name in ("version", "staleness", "sequences", "attention_mask")), strict=True)
    assert sorted(sample["tokens"].tolist() for sample in drawn) == sorted(
        tokens[attention > 0].tolist()
        for trained_at, staleness, tokens, attention in trained
        if trained_at == version and staleness.any()
    )
    # Pruned together with OpenRLHF's own.
    kept = {d.name for d in (directory / "ckpt/_actor").iterdir() if d.is_dir()}
    assert {d.name for d in (directory / "ckpt/_replay").iterdir()} == kept
    assert {d.name for d in (directory / "ckpt/_steady").iterdir()} == kept

    for file in directory.glob("ckpt/_replay/*/groups.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    saved = pool_directory(args.ckpt.path) / "groups.safetensors"
    with pytest.raises(SystemExit) as exit_:
        pipeline.parse(resume)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exit_.value.code == 2 and str(saved) in error and "--replay.discard_saved" in error
    pipeline.parse([*resume, "--replay.discard_saved"])
