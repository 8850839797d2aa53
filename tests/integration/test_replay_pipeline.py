"""Stale tokens in the real pipeline: the behavior policy of each ratio, staleness, replay and resuming."""

import shutil

import pipeline
import pytest
import recordings
import replay

from openrlhf_bapo.openrlhf.replay_checkpoint import load_clip_rule, load_saved_pool


@pytest.fixture
def directory(tmp_path):
    return pipeline.make_model(tmp_path, num_prompts=160)


def test_async_ratios_of_fresh_and_replayed_tokens_are_taken_against_the_weights_that_generated_them(directory):
    flags = replay.flags(directory, **replay.ASYNC | dict(data__max_samples=96))
    steps, batch, policies = recordings.train(directory, flags)
    assert len(steps) == 6
    assert all(step["offpolicy/mixed_versions"] == 0 for step in steps)
    recordings.assert_ratios_are_against_the_policy_that_generated(batch, policies, sampled=True, num_first=2)
    counted = recordings.steps_by_version(batch, num_first=2)
    recordings.assert_optimizer_steps_are_counted(batch, steps, 2, counted)
    # More samples are stale than were replayed, because fresh ones are generated while the batch before is trained on.
    num_stale = batch["version"][batch["staleness"].amax(-1) > 0].bincount(minlength=6).tolist()
    assert any(stale > 4 * step["replay/groups_sampled"] for stale, step in zip(num_stale, steps, strict=True))


def test_async_ppo_takes_its_ratios_against_the_weights_that_generated_each_token_and_says_so(directory):
    given = dict(policy_loss="ppo", replay__ratio=None, replay__max_staleness=None, replay__max_reuse=None)
    given |= dict(data__max_samples=96, rollout__temperature=0.7)  # engine and actor have to divide the logits alike
    flags = replay.flags(directory, **replay.ASYNC | given)
    flags += ["--actor.eps_clip_low_high", "0.5", "0.2"]
    recorder = recordings.environment(directory / "recording")
    output = pipeline.train(directory, flags, "ppo", **recorder)
    assert output.count("--train.async_enable: the ratio is against the engine's log-probs") == 1
    steps, batch = pipeline.steps(output), recordings.trained_on(directory / "recording")
    assert len(steps) == 6 and max(step["offpolicy/staleness_max"] for step in steps) > 0
    policies = recordings.Policies(directory / "model", directory / "recording", temperature=0.7)
    recordings.assert_ratios_are_against_the_policy_that_generated(batch, policies, sampled=True, num_first=2)


def test_decoupled_async_ratios_start_at_the_training_steps_weights_and_losses_are_weighed_by_those_over_the_engines(
    directory,
):
    flags = replay.flags(directory, **replay.ASYNC | dict(offpolicy__objective="decoupled", data__max_samples=96))
    steps, batch, policies = recordings.train(directory, flags)
    assert len(steps) == 6 and sum(step["replay/groups_sampled"] for step in steps) > 0
    recordings.assert_ratios_are_against_the_policy_that_training_started_from(batch, policies, num_first=2)
    weights = (batch["denominators"] - batch["rollout_log_probs"]).exp()
    assert (weights > 2).any() and any(step["is_filter_ratio"] > 0 for step in steps)
    recordings.assert_losses_are_weighted(batch, weights.clamp(max=2), steps, num_first=2)


def test_a_killed_run_resumes_with_its_pool_and_trains_on_the_groups_that_it_would_have_drawn(directory, capsys):
    # The rewards of the sixth rollout wait for the kill.
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
    flags = replay.flags(directory, ckpt__save_steps=2, ckpt__max_num=2, bapo__smoothing=3)
    # The whole line, because its metrics are read below.
    log = recordings.kill(directory, flags, lambda log: len(pipeline.steps(log.read_text())) == 5)
    waiting.unlink()
    shutil.rmtree(directory / "ckpt/_replay/global_step4")  # the checkpoint before it is complete

    # With this half-life the bounds stay as they were loaded, so that they can be compared.
    resume = [*flags, "--ckpt.load_enable", "--bapo.smoothing", "1e12"]
    args = pipeline.parse(resume)
    assert args.ckpt.resume_from == "global_step2" and "resumes global_step2, because" in capsys.readouterr().err
    pool, state = load_saved_pool(args, args.ckpt.resume_from)
    version = state["policy_version"]
    assert version == 2 and len(pool) >= 8
    pool.sample(0, version)
    num_groups = min(16, len(pool)) // 8 * 8  # whole optimizer steps of 32 samples
    drawn = [sample for group in pool.sample(num_groups, version) for sample in group.samples]

    steady = load_clip_rule(args, args.ckpt.resume_from)
    bounds = {"low": float(steady["lower"]), "high": float(steady["upper"])}
    # Two steps moved them by far more than the tolerance below.
    assert abs(bounds["low"] - 0.75) > 1e-4 < abs(bounds["high"] - 2.1)

    # The first broadcast publishes the resumed weights.
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
    # Our state is removed together with OpenRLHF's checkpoints.
    kept = {d.name for d in (directory / "ckpt/_actor").iterdir() if d.is_dir()}
    assert {d.name for d in (directory / "ckpt/_replay").iterdir()} == kept
    assert {d.name for d in (directory / "ckpt/_rule").iterdir()} == kept
