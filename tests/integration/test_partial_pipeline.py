"""A token budget in the real pipeline: the weights that generated each token, and that no prompt is lost."""

from collections import Counter

import partial
import pytest
import recordings
import torch


def test_every_token_is_trained_on_once_against_the_weights_of_its_own_version(tmp_path):
    directory = partial.make_model(tmp_path)
    steps, batch, policies = recordings.train(directory, partial.flags(directory, partial__oversample=3))
    assert len(steps) == 6
    partial.assert_every_prompt_is_trained_on_once(batch)
    totals = sum(map(Counter, steps), Counter())
    assert totals["partial/started"] == totals["partial/taken"] == partial.NUM_PROMPTS
    assert totals["partial/dropped"] == steps[-1]["partial/in_flight"] == steps[-1]["partial/waiting"] == 0
    assert max(step["partial/in_flight"] for step in steps) > 0 < totals["partial/resumed"]
    assert all(0 <= step["partial/slowest_share"] < 1 for step in steps)
    assert partial.num_finished(batch) == totals["partial/finished"] == 0
    assert max(step["offpolicy/staleness_max"] for step in steps) >= 2
    partial.assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines=False)
    assert max(partial.num_versions(batch)) >= 3
    by_step = torch.tensor(partial.num_versions(batch)).gt(1).double().view(6, -1).mean(-1)
    assert [step["offpolicy/mixed_versions"] for step in steps] == pytest.approx(by_step.tolist())
    recordings.assert_optimizer_steps_are_counted(batch, steps, 2, recordings.steps_by_version(batch, num_first=2))


def test_an_async_run_killed_at_a_random_step_continues_its_responses_and_trains_on_every_prompt_once(tmp_path):
    partial.assert_a_killed_run_loses_nothing(tmp_path, partial.ASYNC)
