"""Replay with weights published during responses on two ranks, and with GAE and the engine's log-probs."""

import pipeline
import pytest
import recordings
import replay
import torch


@pytest.fixture
def directory(tmp_path):
    return pipeline.make_model(tmp_path, num_prompts=160)


def test_on_two_ranks_a_response_during_a_weight_update_has_ratios_against_both_versions(directory):
    recorder = recordings.environment(directory / "recording") | {"RECORDING_MIXED": "1"}
    partial = dict(train__partial_rollout_enable=True, actor__num_gpus_per_node=2, data__max_samples=96)
    flags = replay.flags(directory, **replay.ASYNC, **partial)
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
    assert mixed.any()


def test_with_gae_and_the_engines_log_probs_replayed_samples_are_unchanged(directory):
    flags = replay.flags(
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
