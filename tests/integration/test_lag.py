"""--offpolicy.lag: every rollout is trained on so many rollouts after it was made, in order, and none is lost."""

import os
import signal

import pipeline
import pytest
import recordings
import torch
from partial import NUM_PROMPTS, NUM_SAMPLES, make_model, prompts_trained

LAG, NUM_STEPS = 3, 6


def lag_flags(folder, **overrides) -> list[str]:
    """Six rollouts of 16 groups of 4, and as many global steps of two optimizer steps."""
    flags = dict(
        policy_loss="bapo",
        data__max_samples=NUM_PROMPTS,
        actor__adam__lr=3e-4,
        train__micro_batch_size=16,
        offpolicy__lag=LAG,
    )
    return pipeline.flags(folder, **flags | overrides)


def test_a_killed_run_goes_on_with_its_queue_and_every_rollout_is_trained_on_in_order_three_versions_later(
    tmp_path, capsys
):
    directory = make_model(tmp_path)
    flags = lag_flags(directory, ckpt__save_steps=1, ckpt__max_num=2, bapo__dump_tokens=2)
    saved = directory / "ckpt/_partial/global_step2/pool.json"
    log, command = directory / "killed.log", [pipeline.warm_python(), *pipeline.TRAIN, *flags]
    with pipeline.running(command, log, **recordings.environment(directory / "killed")) as process:
        pipeline.wait_until(saved.exists, process, log)
        os.killpg(process.pid, signal.SIGKILL)
    version = int((directory / "ckpt/_actor/latest").read_text().strip().removeprefix("global_step"))
    resume = [*flags, "--ckpt.load_enable"]
    for other, message in (("0", "give --offpolicy.lag 3"), ("2", "--offpolicy.lag '3', but this run has")):
        with pytest.raises(SystemExit):
            pipeline.parse([*resume, "--offpolicy.lag", other])
        assert message in capsys.readouterr().err

    recorder = recordings.environment(directory / "resumed", start=version - 1)
    steps = pipeline.steps(pipeline.train(directory, resume, "resumed", **recorder))
    assert len(steps) == NUM_STEPS - version
    waiting = [min(LAG, NUM_STEPS - 1 - step) * 16 for step in range(version, NUM_STEPS)]
    assert [step["partial/waiting"] for step in steps] == waiting and steps[-1]["partial/in_flight"] == 0
    folders = [directory / "killed", directory / "resumed"]
    before, after = (recordings.trained_on(folder) for folder in folders)
    # The first rollouts are all of the first policy; from then on staleness is the lag.
    for batch in (before, after):
        expected = torch.where(batch["action_mask"] > 0, batch["version"].clamp(max=LAG)[:, None], 0)
        assert torch.equal(batch["staleness"].long(), expected)
    assert [step["offpolicy/staleness_mean"] for step in steps] == [min(LAG, v) for v in range(version, NUM_STEPS)]
    kept = before["version"] < version  # a step that no checkpoint holds is made again
    counted = prompts_trained({name: tensor[kept] for name, tensor in before.items()}) + prompts_trained(after)
    assert len(counted) == NUM_PROMPTS and set(counted.values()) == {NUM_SAMPLES}
    policies = recordings.Policies(directory / "model", *folders)
    # All of them are stale by now: the ratio is taken against what the engine sampled with, at its version's weights.
    mask = after["action_mask"] > 0
    for shift in (-1, 0, 1):
        gap = policies.log_probs(after, after["versions"] + shift, sampled=True) - after["denominators"]
        if shift:
            assert gap[mask].abs().nanmedian() > recordings.APART
        else:
            assert gap[mask].abs().max() < recordings.CLOSE

    dumped = sorted((directory / "tensorboard/tokens").iterdir())
    assert [file.name for file in dumped] == [f"step_00000{step}_rank0.parquet" for step in (2, 4, 6)]
    logged = {step: metrics for step, metrics in enumerate(pipeline.steps(log.read_text()), 1)}
    logged |= {step: metrics for step, metrics in enumerate(steps, version + 1)}
    for step, file in zip((2, 4, 6), dumped, strict=True):
        if step == 2 and step not in logged:
            continue  # the kill came between its checkpoint and its log
        batch = before if step <= version else after
        recordings.assert_tokens_are_those_trained_on(file, batch, logged[step], num_first=2)


def test_balanced_trains_stale_tokens_with_the_weights_that_all_tokens_of_their_optimizer_step_give(tmp_path):
    directory, target = make_model(tmp_path), 0.7
    flags = lag_flags(
        directory, policy_loss="balanced", balanced__target=target, offpolicy__lag=1, data__max_samples=NUM_PROMPTS // 2
    )
    recorder = recordings.environment(directory / "recording")
    steps = pipeline.steps(pipeline.train(directory, flags, "balanced", **recorder))
    batch = recordings.trained_on(directory / "recording")
    mask, advantages = batch["action_mask"] > 0, batch["loss_advantages"]
    ratio = torch.where(mask, batch["log_probs"] - batch["denominators"], 0.0).exp()
    weights = torch.where(advantages > 0, 1.0, ratio.clamp(max=1.0)) * mask
    assert len(steps) == NUM_STEPS // 2 and (weights[mask] < 0.9).any()  # some negative tokens are stale
    update = batch["place"] // 2  # two micro-batches of 16 samples
    for version, logged in enumerate(steps):
        scales, shares = [], []
        for number in range(2):
            rows = (batch["version"] == version) & (update == number)
            sizes, is_positive = (weights * advantages)[rows], advantages[rows] > 0
            positive, negative = float(sizes[is_positive].sum()), -float(sizes[~is_positive].sum())
            scales.append(min(1.0, positive * (1 - target) / (target * negative)))
            shares.append(positive / (positive + scales[-1] * negative))
            # Each of the two micro-batches is divided by half of the update's tokens, and the gradients are averaged.
            found = sum(batch["loss"][rows & (batch["place"] == place)][0] for place in batch["place"][rows].unique())
            expected = -(positive - scales[-1] * negative) / int(mask[rows].sum())
            assert float(found) / 2 == pytest.approx(expected, abs=1e-5), (version, number)
        assert logged["bapo/negative_weight"] == pytest.approx(sum(scales) / 2, rel=1e-4)
        assert logged["bapo/positive_share"] == pytest.approx(sum(shares) / 2, rel=1e-4)
        assert min(scales) < 1 and "bapo/clip_low" not in logged
