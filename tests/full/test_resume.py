"""A run that is resumed goes on as if nothing had happened."""

import shutil
from argparse import Namespace

import partial
import pipeline
import recordings
import torch

from openrlhf_bapo.openrlhf.replay_checkpoint import use_checkpoint

QUICKER = {"TORCHDYNAMO_DISABLE": "1"}  # a step would wait for compilers, and here for nothing else


def test_a_resumed_runs_steps_equal_those_of_the_unbroken_run(tmp_path):
    directory = pipeline.make_model(tmp_path, num_prompts=64)
    flags = pipeline.flags(
        directory,
        policy_loss="bapo",
        algo__advantage__estimator="gae",
        critic__adam__lr=1e-3,
        actor__lr_scheduler="cosine_with_min_lr",
        actor__lr_warmup_ratio=0.1,
        data__max_samples=64,
        ckpt__save_steps=1,
        ckpt__max_num=9,
        replay__ratio=1,
        replay__max_reuse=4,
        train__full_determinism_enable=True,
        train__micro_batch_size=16,
    )
    recorder = recordings.environment(directory / "unbroken") | QUICKER
    unbroken = pipeline.train(directory, flags, "unbroken", **recorder)
    # The files of a machine that dies after the second step.
    for part in ("_actor", "_critic", "_replay"):
        for step in (3, 4):
            shutil.rmtree(directory / "ckpt" / part / f"global_step{step}")
    for part in ("_actor", "_critic"):
        (directory / "ckpt" / part / "latest").write_text("global_step2")

    recorder = recordings.environment(directory / "resumed", start=1) | QUICKER  # it publishes the saved weights first
    resumed = pipeline.train(directory, [*flags, "--ckpt.load_enable"], "resumed", **recorder)
    expected, found = recordings.metrics(unbroken)[2:], recordings.metrics(resumed)
    assert len(expected) == 2 and all(step["replay/groups_sampled"] for step in expected)
    # OpenRLHF logs beside every micro-batch the critic's norm of the optimizer step before, which a new process lacks.
    expected[0].pop("critic_grad_norm"), found[0].pop("critic_grad_norm")
    assert expected == found
    for model in ("actor", "critic"):
        whole, rest = (recordings.trained_on(directory / name, model) for name in ("unbroken", "resumed"))
        later = whole["version"] >= 2
        assert rest.keys() == whole.keys() and later.sum() == len(rest["version"]) > 2 * 64
        for name, values in rest.items():
            close = recordings.CLOSE if name == "rollout_log_probs" else 0
            torch.testing.assert_close(values, whole[name][later], rtol=0, atol=close, equal_nan=True)


def test_a_resumed_async_run_first_trains_on_the_samples_that_waited(tmp_path):
    directory = partial.make_model(tmp_path)
    # Five of the six training steps are on the first rollout.
    sizes = dict(partial__token_budget=None, rollout__vllm_generate_batch_size=80, ckpt__save_steps=1, ckpt__max_num=9)
    flags = partial.flags(directory, **sizes, **partial.ASYNC)
    unbroken = pipeline.train(directory, flags, "unbroken", **recordings.environment(directory / "unbroken"))
    counts = [step["rollout/samples_waiting"] for step in pipeline.steps(unbroken)]
    assert counts == [256, 192, 128, 64, 0, 0]
    # The files of a machine that dies after the second step.
    for step in (3, 4, 5, 6):
        shutil.rmtree(directory / f"ckpt/_actor/global_step{step}")
        shutil.rmtree(directory / f"ckpt/_buffer/global_step{step}", ignore_errors=True)
    (directory / "ckpt/_actor/latest").write_text("global_step2")

    recorder = recordings.environment(directory / "resumed", start=1)  # it publishes the saved weights first
    resumed = pipeline.train(directory, [*flags, "--ckpt.load_enable"], "resumed", **recorder)
    steps = pipeline.steps(resumed)
    assert [step["rollout/samples_waiting"] for step in steps] == counts[2:]
    whole, rest = (recordings.trained_on(directory / name) for name in ("unbroken", "resumed"))
    for step in range(2, 5):
        expected, found = (samples_of(batch, step) for batch in (whole, rest))
        assert expected == found and len(found) == 64
    partial.assert_every_prompt_is_trained_on_once(partial.before(2, whole), rest)
    policies = recordings.Policies(directory / "model", *(directory / name for name in ("unbroken", "resumed")))
    partial.assert_denominators_are_of_the_tokens_own_versions(rest, policies, engines=True)


def samples_of(batch: dict[str, torch.Tensor], version: int) -> list[tuple]:
    """Return tokens, versions, staleness, log-probs and reward of the samples trained on at a version, sorted."""
    chosen = batch["version"] == version
    columns = [batch[name][chosen] for name in ("sequences", "versions", "staleness", "rollout_log_probs", "rewards")]
    rows = zip(*columns, batch["action_mask"][chosen] > 0, strict=True)
    return sorted(
        (tokens[:-1][mask].tolist(), *(values[mask].tolist() for values in others), float(reward))
        for tokens, *others, reward, mask in rows
    )


def test_a_finished_run_that_is_run_again_trains_no_more(tmp_path):
    directory = pipeline.make_model(tmp_path, num_prompts=28)
    flags = pipeline.flags(
        directory, policy_loss="bapo", data__max_samples=28, ckpt__save_steps=1, ckpt__load_enable=True
    )
    first, again = (pipeline.steps(pipeline.train(directory, flags, name)) for name in ("first", "again"))
    # The last 12 prompts x 4 samples fill one optimizer step of 32 samples.
    assert [step["rollout/num_samples"] for step in first] == [64, 32]
    assert "rollout/groups_left_over" not in first[0] and first[1]["rollout/groups_left_over"] == 4
    assert again == []


def test_a_checkpoint_that_was_being_written_is_removed_before_it_can_push_out_the_whole_one(tmp_path):
    for group, latest in (("_actor", 4), ("_critic", 6)):
        for step in (2, 4, 6, 10):
            (tmp_path / group / f"global_step{step}").mkdir(parents=True)
        (tmp_path / group / "latest").write_text(f"global_step{latest}")
    use_checkpoint(Namespace(**{"ckpt.path": tmp_path, "ckpt.resume_from": "global_step2"}))
    left = {folder.relative_to(tmp_path).as_posix() for folder in tmp_path.glob("*/global_step*")}
    # Whole checkpoints stay, resumed or not.
    steps = {"_actor": (2, 4), "_critic": (2, 4, 6)}
    assert left == {f"{group}/global_step{step}" for group, of_group in steps.items() for step in of_group}
    assert {file.read_text() for file in tmp_path.glob("*/latest")} == {"global_step2"}


def test_a_resumed_actor_takes_the_samples_in_the_order_of_the_unbroken_one(tmp_path):
    directory = pipeline.make_model(tmp_path)
    samples = pipeline.make_experience([3, 7, 5, 8, 2, 6, 4, 9], seed=3)
    steps = dict(ckpt__save_steps=1, train__batch_size=4, train__micro_batch_size=2)
    argv = pipeline.flags(directory, policy_loss="bapo", train__full_determinism_enable=True, **steps)
    (unbroken,) = pipeline.train_policy_actors(directory, argv, [samples], num_steps=2, save_after=1)
    assert not (directory / "ckpt/_rule").exists()  # a search does not follow earlier updates
    sizes = [search["num_tokens"] for search in unbroken["searches"]]  # of each step's two updates
    assert len(sizes) == 4 and sizes[:2] != sizes[2:]  # the steps take the samples in different orders
    (resumed,) = pipeline.train_policy_actors(directory, [*argv, "--ckpt.load_enable"], [samples])
    assert resumed["status"]["policy_loss"] == unbroken["status"]["policy_loss"]
    assert all(torch.equal(resumed["weights"][name], weight) for name, weight in unbroken["weights"].items())
