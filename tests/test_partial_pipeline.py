"""A token budget through the real pipeline: who wrote which token, and that every prompt is trained on once."""

import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pipeline
import pytest
import recordings
import torch

from openrlhf_bapo.adapter.replay_checkpoint import load_unfinished

NUM_PROMPTS, NUM_SAMPLES = 96, 4


@pytest.fixture
def directory(tmp_path):
    """As the harness makes it, but that no two prompts are alike, and their responses' ends are late and far apart."""
    pipeline.make_model(tmp_path)
    with open(tmp_path / "train.jsonl", "w") as file:
        for n in range(NUM_PROMPTS):
            file.write(json.dumps({"input": f"{n // 10}+{n % 10}=", "label": "", "datasource": "sums"}) + "\n")
    return tmp_path


def partial_flags(directory, **overrides) -> list[str]:
    """Six global steps of 16 groups of 4, two micro-batches an optimizer step, if no group is dropped."""
    flags = dict(
        policy_loss="bapo",
        data__max_samples=NUM_PROMPTS,
        data__max_len=72,
        rollout__max_new_tokens=64,
        actor__adam__lr=3e-4,
        train__micro_batch_size=16,
        partial__token_budget=16,
    )
    return pipeline.flags(directory, **flags | overrides)


def prompts_trained(batch: dict[str, torch.Tensor]) -> Counter:
    """How many samples of each prompt were trained on; a prompt as its tokens."""
    starts = (batch["action_mask"] > 0).int().argmax(-1) + 1
    tokens = zip(batch["sequences"], batch["attention_mask"], starts, strict=True)
    return Counter(tuple(row[:start][mask[:start] > 0].tolist()) for row, mask, start in tokens)


def num_versions(batch: dict[str, torch.Tensor]) -> list[int]:
    mask = batch["action_mask"] > 0
    return [len(set(row[chosen].tolist())) for row, chosen in zip(batch["versions"], mask, strict=True)]


def num_finished(batch: dict[str, torch.Tensor], max_tokens: int = 64) -> int:
    """How many responses were ended where they were; the others end of themselves or at `max_tokens`."""
    mask = batch["action_mask"] > 0
    last = batch["sequences"][:, 1:].gather(-1, mask.cumsum(-1).argmax(-1, keepdim=True))[:, 0]
    assert torch.equal(batch["truncated"] > 0, last != pipeline.EOS)
    return int((batch["truncated"] > 0)[mask.sum(-1) < max_tokens].sum())


def assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines: bool) -> None:
    """The engine's log-probs are of the weights that generated the token, and of no neighbouring ones.

    Args:
        engines: whether the denominators of fresh tokens are to be the engine's too, or the actor's own.
    """
    mask = batch["action_mask"] > 0
    assert torch.equal(batch["staleness"].long(), torch.where(mask, batch["version"][:, None] - batch["versions"], 0))
    stale, fresh = batch["staleness"] > 0, mask & (batch["staleness"] == 0)
    sampled = policies.log_probs(batch, batch["versions"], sampled=True)
    assert (sampled - batch["rollout_log_probs"])[mask].abs().max() < recordings.CLOSE
    assert (sampled - batch["denominators"])[stale].abs().max() < recordings.CLOSE
    own = policies.log_probs(batch, batch["versions"], sampled=engines)
    assert (own - batch["denominators"])[fresh].abs().max() < recordings.CLOSE
    for shift in (-1, 1):
        other = policies.log_probs(batch, batch["versions"] + shift, sampled=True)
        assert (other - batch["rollout_log_probs"])[mask].abs().nanmedian() > recordings.APART


@pytest.mark.pipeline
def test_greedy_responses_made_in_segments_are_those_made_in_one_go_token_by_token(directory):
    recorder = recordings.environment(directory / "recording")  # in float32, where equal logits stay equal
    command = [sys.executable, __file__, str(directory)]
    with pipeline.running(command, directory / "greedy.log", **recorder) as process:
        assert process.wait(300) == 0, (directory / "greedy.log").read_text()[-3000:]
    once, again, *in_segments = json.loads((directory / "greedy.json").read_text())
    assert len({len(response["tokens"]) for response in once}) > 4
    assert any(response["outcome"]["truncated"] for response in once)

    def noise(others) -> float:
        return max(
            abs(a - b)
            for mine, other in zip(once, others, strict=True)
            for a, b in zip(mine["log_probs"], other["log_probs"], strict=True)
        )

    assert [response["tokens"] for response in again] == [response["tokens"] for response in once]
    for responses in in_segments:
        assert [r["tokens"] for r in responses] == [r["tokens"] for r in once]
        assert [r["outcome"] for r in responses] == [r["outcome"] for r in once]
        assert noise(responses) < max(noise(again), recordings.CLOSE)


def _generate_greedily(directory: Path) -> None:
    """Write what an engine makes of every prompt in one go, twice, and then by budgets of 1, 7 and 30 tokens, and
    stopped at any moment."""
    import asyncio

    from openrlhf_bapo.adapter import evaluation

    prompts = [json.loads(line)["input"] for line in open(directory / "train.jsonl")][:40]

    async def main() -> list:
        import transformers
        import vllm

        tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
        params = vllm.SamplingParams(temperature=0.0, max_tokens=64, min_tokens=1, logprobs=1)

        async def respond(engine, prompt: str, budget: int) -> dict:
            whole = {"tokens": [], "log_probs": [], "outcome": None}
            while whole["outcome"] is None:
                (piece,) = await engine.grow_responses.remote(
                    prompt=(0, prompt),
                    label="",
                    sampling_params=params,
                    max_length=72,
                    hf_tokenizer=tokenizer,
                    kept_tokens={0: whole["tokens"]},
                    budget=budget,
                )
                assert len(piece["tokens"]) <= budget
                for name in ("tokens", "log_probs"):
                    whole[name] += piece[name]
                whole["outcome"] = piece["outcome"]
            return whole

        async def stop(engine) -> None:
            while True:
                await asyncio.sleep(0.05)
                await engine.stop_growing.remote()

        found = []
        with evaluation.running_engines(
            str(directory / "model"), 1, 1, 0.5, seed=0, max_model_len=72, endpoints=[str(directory / "reward.py")]
        ) as (engine,):
            for budget, is_stopped in ((64, False), (64, False), (1, False), (7, False), (30, False), (64, True)):
                stopping = asyncio.ensure_future(stop(engine)) if is_stopped else None
                found.append(await asyncio.gather(*(respond(engine, prompt, budget) for prompt in prompts)))
                if stopping:
                    stopping.cancel()
        return found

    (directory / "greedy.json").write_text(json.dumps(asyncio.run(main())))


@pytest.mark.pipeline
def test_every_token_is_trained_on_once_against_the_weights_that_wrote_it_in_up_to_three_versions(directory):
    recorder = recordings.environment(directory / "recording")
    flags = partial_flags(directory, partial__oversample=3, partial__token_budget=8)
    steps = pipeline.steps(pipeline.train(directory, flags, "sync", **recorder))
    assert len(steps) == 6
    batch = recordings.trained_on(directory / "recording")
    counted = prompts_trained(batch)
    assert len(counted) == NUM_PROMPTS and set(counted.values()) == {NUM_SAMPLES}
    totals = Counter()
    for step in steps:
        totals.update(step)
    assert totals["partial/started"] == totals["partial/taken"] == NUM_PROMPTS
    assert totals["partial/dropped"] == steps[-1]["partial/in_flight"] == steps[-1]["partial/waiting"] == 0
    assert max(step["partial/in_flight"] for step in steps) > 0 < totals["partial/resumed"]
    assert all(0 <= step["partial/slowest_share"] < 1 for step in steps)
    assert num_finished(batch) == totals["partial/finished"] == 0
    assert max(step["offpolicy/staleness_max"] for step in steps) >= 2

    policies = recordings.Policies(directory / "model", directory / "recording")
    assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines=False)
    assert max(num_versions(batch)) >= 3
    by_step = torch.tensor(num_versions(batch)).gt(1).double().view(6, -1).mean(-1)
    assert [step["offpolicy/mixed_versions"] for step in steps] == pytest.approx(by_step.tolist())
    recordings.assert_optimizer_steps_are_counted(batch, steps, 2, recordings.steps_by_version(batch, num_first=2))


ASYNC = dict(train__async_enable=True, train__async_queue_size=2)
# Of the 32 groups in flight 16 are one version old. They are taken in the next rollout, whether complete or finished;
# with responses so much longer than the budget some are not complete when 16 of the 32 are.
LONG = dict(data__max_len=120, rollout__max_new_tokens=112, partial__token_budget=8)
FINISH = dict(partial__max_staleness=1, partial__on_stale="finish", **LONG)


@pytest.mark.pipeline
@pytest.mark.parametrize("mode", [FINISH, ASYNC], ids=["sync", "async"])
def test_a_run_killed_at_a_random_step_goes_on_with_its_unfinished_responses_and_trains_on_every_prompt_once(
    directory, mode
):
    flags = partial_flags(directory, partial__oversample=2, ckpt__save_steps=1, ckpt__max_num=2, **mode)
    killed_at = random.randint(1, 4)
    saved = directory / f"ckpt/_partial/global_step{killed_at}/pool.json"
    log, command = directory / "killed.log", [sys.executable, "-m", "openrlhf_bapo.cli.train_ppo_ray", *flags]
    with pipeline.running(command, log, **recordings.environment(directory / "killed")) as process:
        pipeline.wait_until(saved.exists, process, log)
        os.killpg(process.pid, signal.SIGKILL)
    version = int((directory / "ckpt/_actor/latest").read_text().strip().removeprefix("global_step"))
    pool, _ = load_unfinished(pipeline.parse([*flags, "--ckpt.load_enable"]))
    num_waiting = len(pool)
    assert version >= killed_at and num_waiting > 0

    recorder = recordings.environment(directory / "resumed", start=version - 1)
    steps = pipeline.steps(pipeline.train(directory, [*flags, "--ckpt.load_enable"], "resumed", **recorder))
    assert len(steps) == 6 - version
    folders = [directory / "killed", directory / "resumed"]
    before, after = (recordings.trained_on(folder) for folder in folders)
    kept = before["version"] < version  # a step that no checkpoint holds is made again
    counted = prompts_trained({name: tensor[kept] for name, tensor in before.items()}) + prompts_trained(after)
    assert len(counted) == NUM_PROMPTS and set(counted.values()) == {NUM_SAMPLES}
    policies = recordings.Policies(directory / "model", *folders)
    assert_denominators_are_of_the_tokens_own_versions(after, policies, engines=mode is ASYNC)
    assert sum(step["partial/started"] for step in steps) + num_waiting == 16 * len(steps)
    finished = [num_finished(batch, 112 if mode is FINISH else 64) for batch in (before, after)]
    assert finished[1] == sum(step["partial/finished"] for step in steps)
    # In the last rollout there is nothing that could end it early, so that the responses end of themselves.
    assert (sum(finished) > 0) == (mode is FINISH)
    if mode is FINISH:
        assert max(step["offpolicy/staleness_max"] for step in steps) == 1
    # What was begun before the kill was finished after it.
    assert (after["versions"].masked_fill(after["action_mask"] == 0, 99) < version).any()
    assert max(num_versions(after)) >= 2


@pytest.mark.pipeline
def test_in_async_training_every_prompt_is_trained_on_once_against_the_weights_that_wrote_it(directory):
    recorder = recordings.environment(directory / "recording")
    flags = partial_flags(directory, partial__oversample=2, **ASYNC)
    steps = pipeline.steps(pipeline.train(directory, flags, "async", **recorder))
    assert len(steps) == 6
    batch = recordings.trained_on(directory / "recording")
    counted = prompts_trained(batch)
    assert len(counted) == NUM_PROMPTS and set(counted.values()) == {NUM_SAMPLES}
    assert sum(step["partial/started"] for step in steps) == sum(step["partial/taken"] for step in steps) == NUM_PROMPTS
    policies = recordings.Policies(directory / "model", directory / "recording")
    assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines=True)
    assert max(num_versions(batch)) >= 2
    # As old as --partial.max_staleness allows at hand-over, and the queue after it.
    assert max(step["offpolicy/staleness_max"] for step in steps) >= 2


@pytest.mark.pipeline
def test_with_pausing_and_replay_a_response_is_written_across_updates_and_rollouts(directory):
    recorder = recordings.environment(directory / "recording") | {"RECORDING_MIXED": "1"}
    flags = dict(train__partial_rollout_enable=True, replay__ratio=1, replay__max_staleness=4, replay__max_reuse=1)
    argv = partial_flags(directory, partial__oversample=2, **ASYNC, **flags)
    steps = pipeline.steps(pipeline.train(directory, argv, "mixed", **recorder))
    assert len(steps) == 6
    batch = recordings.trained_on(directory / "recording")
    assert len(prompts_trained(batch)) == NUM_PROMPTS
    assert sum(step["partial/started"] for step in steps) == sum(step["partial/taken"] for step in steps) == NUM_PROMPTS
    assert sum(step["replay/groups_sampled"] for step in steps) > 0
    policies = recordings.Policies(directory / "model", directory / "recording")
    assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines=True)
    assert max(num_versions(batch)) >= 3


@pytest.mark.pipeline
def test_with_filtering_and_replay_every_prompt_is_trained_on_once_as_fresh_or_counted_by_reason(directory):
    # Which groups are filtered is known by the prompt: their rewards are 0 where its second number is 3 or 7.
    reward = (directory / "reward.py").read_text()
    reward = reward.replace("/ 8 for q", "/ 8 + 0.1 if p[2] not in '37' else 0.0 for q")
    (directory / "reward.py").write_text(reward)
    flags = dict(algo__dynamic_filtering_enable=True, replay__ratio=1, replay__max_reuse=1)
    flags = partial_flags(directory, partial__oversample=2, **flags) + ["--algo.dynamic_filtering_range", "0", "100"]
    recorder = recordings.environment(directory / "recording")
    steps = pipeline.steps(pipeline.train(directory, flags, "filtered", **recorder))
    totals = Counter()
    for step in steps:
        totals.update(step)
    batch = recordings.trained_on(directory / "recording")
    counted = prompts_trained(batch)
    is_filtered = [n % 10 in (3, 7) for n in range(NUM_PROMPTS)]
    assert totals["partial/dropped_filtered"] == sum(is_filtered) == 19
    assert not any(pipeline.CHARACTERS[prompt[2] - 3] in "37" for prompt in counted)
    # Of the other 77 the last rollout has 13, which make three micro-batches of 4 groups.
    assert totals["partial/dropped_left_over"] == 1 and totals["partial/dropped"] == 20
    assert totals["partial/started"] == NUM_PROMPTS and totals["partial/taken"] == len(counted) == 76
    assert len(steps) == 5 and totals["replay/samples_dropped"] == 0
    assert Counter(counted.values()) == {
        NUM_SAMPLES: 76 - totals["replay/groups_sampled"],
        2 * NUM_SAMPLES: totals["replay/groups_sampled"],
    }
    assert totals["replay/groups_sampled"] > 0 < totals["partial/resumed"]

    # What is replayed has kept its denominators: the actor's of its then newest tokens, the engine's of the others.
    policies = recordings.Policies(directory / "model", directory / "recording")
    mask = batch["action_mask"] > 0

    def distance(shift: int) -> torch.Tensor:
        found = [policies.log_probs(batch, batch["versions"] + shift, sampled) for sampled in (False, True)]
        return torch.minimum(*((log_probs - batch["denominators"]).abs()[mask] for log_probs in found))

    assert distance(0).max() < recordings.CLOSE
    assert min(distance(shift).nanmedian() for shift in (-1, 1)) > recordings.APART
    assert max(num_versions(batch)) >= 2


if __name__ == "__main__":
    _generate_greedily(Path(sys.argv[1]))
