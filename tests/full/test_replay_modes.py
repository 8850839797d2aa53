"""Replay with weights published during responses on two ranks, and with GAE and the engine's log-probs."""

import pipeline
import pytest
import recordings
import replay


@pytest.fixture
def directory(tmp_path):
    return pipeline.make_model(tmp_path, num_prompts=160)


def test_on_two_ranks_a_response_during_a_weight_update_has_ratios_against_both_versions(directory):
    partial = dict(train__partial_rollout_enable=True, actor__num_gpus_per_node=2, data__max_samples=96)
    flags = replay.flags(directory, **replay.ASYNC, **partial)
    steps, batch, policies = recordings.train(directory, flags, RECORDING_MIXED="1")
    assert len(steps) == 6
    recordings.assert_ratios_are_against_the_policy_that_generated(batch, policies, sampled=True, num_first=1)
    recordings.assert_optimizer_steps_are_counted(batch, steps, 1, recordings.steps_by_version(batch, num_first=1))
    mask = batch["action_mask"] > 0
    oldest, newest = batch["versions"].masked_fill(~mask, 99).amin(-1), batch["versions"].amax(-1)
    mixed = oldest < newest
    assert sum(step["offpolicy/mixed_versions"] * 64 for step in steps) > 0
    assert mixed.any()


def test_with_gae_and_the_engines_log_probs_ratios_of_replayed_samples_are_against_the_policy_that_generated(directory):
    flags = replay.flags(
        directory,
        algo__advantage__estimator="gae",
        critic__adam__lr=1e-3,
        offpolicy__ratio_base="rollout",
        data__max_samples=128,
    )
    steps, batch, policies = recordings.train(directory, flags)
    assert len(steps) == 8
    pipeline.assert_rewards_rise(steps)
    assert steps[-1]["critic_loss"] > 0
    recordings.assert_ratios_are_against_the_policy_that_generated(batch, policies, sampled=True, num_first=2)
