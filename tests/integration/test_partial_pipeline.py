"""A token budget in the real pipeline: the weights that generated each token, and that no prompt is lost."""

from collections import Counter

import partial
import pipeline
import pytest
import recordings
import torch


@pytest.fixture
def directory(tmp_path):
    return partial.make_model(tmp_path)


def test_every_token_is_trained_on_once_against_the_weights_of_its_own_version(directory):
    recorder = recordings.environment(directory / "recording")
    flags = partial.flags(directory, partial__oversample=3)
    steps = pipeline.steps(pipeline.train(directory, flags, "sync", **recorder))
    assert len(steps) == 6
    batch = recordings.trained_on(directory / "recording")
    counted = partial.prompts_trained(batch)
    assert len(counted) == partial.NUM_PROMPTS and set(counted.values()) == {partial.NUM_SAMPLES}
    totals = Counter()
    for step in steps:
        totals.update(step)
    assert totals["partial/started"] == totals["partial/taken"] == partial.NUM_PROMPTS
    assert totals["partial/dropped"] == steps[-1]["partial/in_flight"] == steps[-1]["partial/waiting"] == 0
    assert max(step["partial/in_flight"] for step in steps) > 0 < totals["partial/resumed"]
    assert all(0 <= step["partial/slowest_share"] < 1 for step in steps)
    assert partial.num_finished(batch) == totals["partial/finished"] == 0
    assert max(step["offpolicy/staleness_max"] for step in steps) >= 2

    policies = recordings.Policies(directory / "model", directory / "recording")
    partial.assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines=False)
    assert max(partial.num_versions(batch)) >= 3
    by_step = torch.tensor(partial.num_versions(batch)).gt(1).double().view(6, -1).mean(-1)
    assert [step["offpolicy/mixed_versions"] for step in steps] == pytest.approx(by_step.tolist())
    recordings.assert_optimizer_steps_are_counted(batch, steps, 2, recordings.steps_by_version(batch, num_first=2))


def test_an_async_run_killed_at_a_random_step_continues_its_responses_and_trains_on_every_prompt_once(
    directory,
):
    partial.assert_a_killed_run_loses_nothing(directory, partial.ASYNC)
