"""--offpolicy.lag: every rollout is trained on so many rollouts after it was made, in order, and none is lost."""

import partial
import pipeline
import recordings
import torch

LAG, NUM_STEPS = 3, 6


def lag_flags(folder, **overrides) -> list[str]:
    """Six rollouts of 16 groups of 4, and as many global steps of two optimizer steps."""
    sizes = dict(data__max_len=24, rollout__max_new_tokens=8, partial__token_budget=None, offpolicy__lag=LAG)
    return partial.flags(folder, **sizes | overrides)


def test_a_killed_run_goes_on_with_its_queue_and_every_rollout_is_trained_on_in_order_three_versions_later(tmp_path):
    directory = partial.make_model(tmp_path)
    flags = lag_flags(directory, ckpt__save_steps=1, ckpt__max_num=2, bapo__dump_tokens=2)
    saved = directory / "ckpt/_partial/global_step2/pool.json"
    log = recordings.kill(directory, flags, lambda _: saved.exists())
    version = int((directory / "ckpt/_actor/latest").read_text().strip().removeprefix("global_step"))
    resume = [*flags, "--ckpt.load_enable"]
    recorder = recordings.environment(directory / "resumed", start=version - 1)
    steps = pipeline.steps(pipeline.train(directory, resume, "resumed", **recorder))
    assert len(steps) == NUM_STEPS - version
    waiting = [min(LAG, NUM_STEPS - 1 - step) * 16 for step in range(version, NUM_STEPS)]
    assert [step["partial/waiting"] for step in steps] == waiting and steps[-1]["partial/in_flight"] == 0
    folders = [directory / "killed", directory / "resumed"]
    killed, after = (recordings.trained_on(folder) for folder in folders)
    for batch in (killed, after):  # the first rollouts are all of the first policy; from then on staleness is the lag
        expected = torch.where(batch["action_mask"] > 0, batch["version"].clamp(max=LAG)[:, None], 0)
        assert torch.equal(batch["staleness"].long(), expected)
    assert [step["offpolicy/staleness_mean"] for step in steps] == [min(LAG, v) for v in range(version, NUM_STEPS)]
    partial.assert_every_prompt_is_trained_on_once(partial.before(version, killed), after)
    policies = recordings.Policies(directory / "model", *folders)
    partial.assert_denominators_are_of_the_tokens_own_versions(after, policies, engines=True)

    dumped = sorted((directory / "tensorboard/tokens").iterdir())
    assert [file.name for file in dumped] == [f"step_00000{step}_rank0.parquet" for step in (2, 4, 6)]
    logged = {step: metrics for step, metrics in enumerate(pipeline.steps(log.read_text()), 1)}
    logged |= {step: metrics for step, metrics in enumerate(steps, version + 1)}
    for step, file in zip((2, 4, 6), dumped, strict=True):
        if step == 2 and step not in logged:
            continue  # the kill came between its checkpoint and its log
        batch = killed if step <= version else after
        recordings.assert_tokens_are_those_trained_on(file, batch, logged[step], num_first=2)
