"""Runs under a token budget: their prompts, flags, and checks of their recordings."""

import json
import random
from collections import Counter
from pathlib import Path

import pipeline
import recordings
import torch

from openrlhf_bapo.openrlhf.replay_checkpoint import load_unfinished

NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 96, 4, 112


def make_model(directory: Path) -> Path:
    """Make a model as `pipeline.make_model` does, with distinct prompts whose responses end late and far apart."""
    pipeline.make_model(directory)
    with open(directory / "train.jsonl", "w") as file:
        for n in range(NUM_PROMPTS):
            file.write(json.dumps({"input": f"{n // 10}+{n % 10}=", "label": "", "datasource": "sums"}) + "\n")
    return directory


def flags(directory, **overrides) -> list[str]:
    """Flags of six global steps of 16 groups of 4 samples, with two micro-batches per optimizer step.

    There are six if no group is dropped. A response can take fourteen budgets. When 16 groups of a rollout are
    complete, others are far from complete, however late their engine is stopped, because no response grows by more than
    one budget until then.
    """
    values = dict(
        policy_loss="bapo",
        data__max_samples=NUM_PROMPTS,
        data__max_len=120,
        rollout__max_new_tokens=MAX_TOKENS,
        actor__adam__lr=3e-4,
        train__micro_batch_size=16,
        partial__token_budget=8,
    )
    return pipeline.flags(directory, **values | overrides)


def prompts_trained(batch: dict[str, torch.Tensor]) -> Counter:
    """Return the number of samples of each prompt that were trained on. A prompt is given by its tokens."""
    starts = (batch["action_mask"] > 0).int().argmax(-1) + 1
    tokens = zip(batch["sequences"], batch["attention_mask"], starts, strict=True)
    return Counter(tuple(row[:start][mask[:start] > 0].tolist()) for row, mask, start in tokens)


def assert_every_prompt_is_trained_on_once(*batches: dict[str, torch.Tensor]) -> None:
    """Assert it of all prompts of `make_model`, with all samples of each in the batches together."""
    counted = sum(map(prompts_trained, batches), Counter())
    assert len(counted) == NUM_PROMPTS and set(counted.values()) == {NUM_SAMPLES}


def before(version: int, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the samples that were trained on before a version. Steps after a checkpoint are made again."""
    kept = batch["version"] < version
    return {name: tensor[kept] for name, tensor in batch.items()}


def num_versions(batch: dict[str, torch.Tensor]) -> list[int]:
    mask = batch["action_mask"] > 0
    return [len(set(row[chosen].tolist())) for row, chosen in zip(batch["versions"], mask, strict=True)]


def num_finished(batch: dict[str, torch.Tensor]) -> int:
    """Return the number of responses that were finished early. Others end by themselves or at MAX_TOKENS."""
    mask = batch["action_mask"] > 0
    last = batch["sequences"][:, 1:].gather(-1, mask.cumsum(-1).argmax(-1, keepdim=True))[:, 0]
    assert torch.equal(batch["truncated"] > 0, last != pipeline.EOS)
    return int((batch["truncated"] > 0)[mask.sum(-1) < MAX_TOKENS].sum())


def assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines: bool) -> None:
    """Assert that the engine's log-probs are of the weights that generated the token, and of no neighboring version.

    Args:
        batch: from `recordings.trained_on`.
        policies: the policies of all versions.
        engines: whether the denominators of fresh tokens are the engine's too, or the actor's own.
    """
    mask = batch["action_mask"] > 0
    assert torch.equal(batch["staleness"].long(), torch.where(mask, batch["version"][:, None] - batch["versions"], 0))
    sampled, own = (policies.log_probs(batch, batch["versions"], sampled) for sampled in (True, engines))
    assert (sampled - batch["rollout_log_probs"])[mask].abs().max() < recordings.CLOSE
    denominators = torch.where(batch["staleness"] > 0, sampled, own)
    assert (denominators - batch["denominators"])[mask].abs().max() < recordings.CLOSE
    for shift in (-1, 1):
        other = policies.log_probs(batch, batch["versions"] + shift, sampled=True)
        assert (other - batch["rollout_log_probs"])[mask].abs().nanmedian() > recordings.APART


ASYNC = dict(train__async_enable=True, train__async_queue_size=2)
# 16 of the 32 groups in flight are one version old. The next rollout takes them, either complete or finished. They may
# all be complete, but some of the 384 responses take more than ten budgets, and are finished then.
FINISH = dict(partial__max_staleness=1, partial__on_stale="finish", partial__max_segments=10)


def assert_a_killed_run_loses_nothing(directory: Path, mode: dict) -> None:
    """Kill a run at a random step and resume it; assert that all prompts are trained on once and responses continue.

    Args:
        directory: an empty folder.
        mode: `ASYNC` or `FINISH`.
    """
    argv = flags(make_model(directory), partial__oversample=2, ckpt__save_steps=1, ckpt__max_num=2, **mode)
    killed_at = random.randint(1, 3)

    def saved_step() -> int:
        latest = directory / "ckpt/_actor/latest"  # written last
        return int(latest.read_text().strip().removeprefix("global_step") or 0) if latest.exists() else 0

    recordings.kill(directory, argv, lambda _: saved_step() >= killed_at)
    version = saved_step()
    pool, _ = load_unfinished(pipeline.parse([*argv, "--ckpt.load_enable"]))
    num_waiting = len(pool)
    assert version >= killed_at and num_waiting > 0

    recorder = recordings.environment(directory / "resumed", start=version - 1)
    steps = pipeline.steps(pipeline.train(directory, [*argv, "--ckpt.load_enable"], "resumed", **recorder))
    assert len(steps) == 6 - version
    folders = [directory / "killed", directory / "resumed"]
    killed, after = (recordings.trained_on(folder) for folder in folders)
    assert_every_prompt_is_trained_on_once(before(version, killed), after)
    policies = recordings.Policies(directory / "model", *folders)
    assert_denominators_are_of_the_tokens_own_versions(after, policies, engines=mode is ASYNC)
    assert sum(step["partial/started"] for step in steps) + num_waiting == 16 * len(steps)
    finished = [num_finished(batch) for batch in (killed, after)]
    assert finished[1] == sum(step["partial/finished"] for step in steps)
    # Nothing ends the last rollout early, so its responses end by themselves.
    assert (sum(finished) > 0) == (mode is FINISH)
    if mode is FINISH:
        assert max(step["offpolicy/staleness_max"] for step in steps) == 1
    # Responses that were started before the kill were continued after it.
    assert (after["versions"].masked_fill(after["action_mask"] == 0, 99) < version).any()
    assert max(num_versions(after)) >= 2
