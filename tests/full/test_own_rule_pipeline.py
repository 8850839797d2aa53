"""A clip rule of one's own, from a file, through OpenRLHF's pipeline."""

import pipeline
import pytest
import recordings
import replay
import torch


@pytest.mark.parametrize("stale", [{}, replay.ASYNC], ids=["sync", "async"])
def test_every_update_has_the_weights_of_the_file(tmp_path, stale):
    directory = pipeline.make_model(tmp_path, num_prompts=64)
    rule = dict(policy_loss="examples/my_rule.py:Sapo", rule__positive=2.0, rule__negative=3.0)
    sizes = dict(data__max_samples=64, actor__adam__lr=3e-4, train__micro_batch_size=16)
    environment = recordings.environment(directory / "recording")
    output = pipeline.train(directory, pipeline.flags(directory, **sizes | rule | stale), "run", **environment)
    steps, batch = pipeline.steps(output), recordings.trained_on(directory / "recording")
    assert len(steps) == 4 and all(0 < step["bapo/positive_share"] < 1 for step in steps)
    assert not any("bapo/clip_low" in step for step in steps)

    mask, advantages = batch["action_mask"] > 0, batch["loss_advantages"]
    ratio = (batch["log_probs"] - batch["denominators"]).exp()
    sigma = (torch.where(advantages > 0, 2.0, 3.0) * (ratio - 1)).sigmoid()
    loss = torch.where(mask, -4 * sigma * (1 - sigma) * ratio * advantages, 0.0)
    assert float((ratio[mask] - 1).abs().max()) > 0.05  # the weights differ from 1
    num_micro_batches = 2  # of an optimizer step
    update = batch["place"] // num_micro_batches
    for version in batch["version"].unique():
        for number in update[batch["version"] == version].unique():
            rows = (batch["version"] == version) & (update == number)
            found = sum(batch["loss"][rows & (batch["place"] == place)][0] for place in batch["place"][rows].unique())
            assert abs(found / num_micro_batches - loss[rows].sum() / mask[rows].sum()) < 1e-5
