"""A token budget in every mode: in segments, finishing stale responses, async, pausing, replay, filtering."""

import json
import os
import sys
from collections import Counter
from pathlib import Path

import partial
import pipeline
import pytest
import recordings


@pytest.fixture
def directory(tmp_path):
    return partial.make_model(tmp_path)


def test_greedy_responses_generated_in_segments_equal_those_generated_at_once(directory):
    recorder = recordings.environment(directory / "recording")  # in float32, where equal logits stay equal
    command = [pipeline.warm_python(), __file__, str(directory)]
    recorder["PYTHONPATH"] += os.pathsep + str(pipeline.SUPPORT)
    with pipeline.running(command, directory / "greedy.log", **recorder) as process:
        assert process.wait() == 0, (directory / "greedy.log").read_text()[-3000:]
    once, again, *in_segments = json.loads((directory / "greedy.json").read_text())
    assert len({len(response["tokens"]) for response in once}) > 4
    assert any(response["outcome"]["truncated"] for response in once)

    def noise(others) -> float:
        return max(
            abs(a - b)
            for mine, other in zip(once, others, strict=True)
            for a, b in zip(mine["behavior_log_probs"], other["behavior_log_probs"], strict=True)
        )

    assert [response["tokens"] for response in again] == [response["tokens"] for response in once]
    for responses in in_segments:
        assert [r["tokens"] for r in responses] == [r["tokens"] for r in once]
        assert [r["outcome"] for r in responses] == [r["outcome"] for r in once]
        assert noise(responses) < max(noise(again), recordings.CLOSE)


def _generate_greedily(directory: Path) -> None:
    """Write an engine's responses to all prompts to a file: generated at once, twice, then with budgets of 1, 7 and 30
    tokens, and then stopped at arbitrary times."""
    import asyncio

    from openrlhf_bapo import evaluation

    prompts = [json.loads(line)["input"] for line in (directory / "train.jsonl").read_text().splitlines()][:40]

    async def main() -> list:
        import transformers
        import vllm

        from openrlhf_bapo.openrlhf.vllm_engine import PlacedPrompt

        tokenizer = transformers.AutoTokenizer.from_pretrained(directory / "model")
        params = vllm.SamplingParams(temperature=0.0, max_tokens=64, min_tokens=1, logprobs=1)

        async def respond(engine, prompt: str, budget: int) -> dict:
            whole = {"tokens": [], "behavior_log_probs": [], "outcome": None}
            while whole["outcome"] is None:
                (piece,) = await engine.grow_responses.remote(
                    prompt=PlacedPrompt(0, prompt),
                    label="",
                    sampling_params=params,
                    max_length=72,
                    hf_tokenizer=tokenizer,
                    kept_tokens={0: whole["tokens"]},
                    budget=budget,
                )
                assert len(piece.tokens) <= budget
                for name in ("tokens", "behavior_log_probs"):
                    whole[name] += getattr(piece, name)
                whole["outcome"] = piece.outcome
            return whole

        async def stop(engine) -> None:
            while True:
                await asyncio.sleep(0.05)
                await engine.stop_growing.remote()

        found = []
        with evaluation.running_engines(
            str(directory / "model"),
            num_engines=1,
            tensor_parallel_size=1,
            gpu_memory_utilization=0.5,
            seed=0,
            max_model_len=72,
            endpoints=[str(directory / "reward.py")],
        ) as (engine,):
            for budget, is_stopped in ((64, False), (64, False), (1, False), (7, False), (30, False), (64, True)):
                stopping = asyncio.ensure_future(stop(engine)) if is_stopped else None
                found.append(await asyncio.gather(*(respond(engine, prompt, budget) for prompt in prompts)))
                if stopping:
                    stopping.cancel()
        return found

    (directory / "greedy.json").write_text(json.dumps(asyncio.run(main())))


def test_a_run_killed_at_a_random_step_finishes_stale_responses_and_trains_on_every_prompt_once(tmp_path):
    partial.assert_a_killed_run_loses_nothing(tmp_path, partial.FINISH)


def test_with_pausing_and_replay_a_response_is_generated_across_updates_and_rollouts(directory):
    flags = dict(train__partial_rollout_enable=True, replay__ratio=1, replay__max_staleness=4, replay__max_reuse=1)
    argv = partial.flags(directory, partial__oversample=2, **partial.ASYNC, **flags)
    steps, batch, policies = recordings.train(directory, argv, RECORDING_MIXED="1")
    assert len(steps) == 6
    assert len(partial.prompts_trained(batch)) == partial.NUM_PROMPTS
    for name in ("started", "taken"):
        assert sum(step[f"partial/{name}"] for step in steps) == partial.NUM_PROMPTS
    assert sum(step["replay/groups_sampled"] for step in steps) > 0
    partial.assert_denominators_are_of_the_tokens_own_versions(batch, policies, engines=True)
    assert max(partial.num_versions(batch)) >= 3


def test_with_filtering_and_replay_every_prompt_is_trained_on_once_as_fresh_or_counted_by_reason(directory):
    # Which groups are filtered is known by the prompt: their rewards are 0 where its second number is 3 or 7.
    reward = (directory / "reward.py").read_text()
    reward = reward.replace("/ 8 for q", "/ 8 + 0.1 if p[2] not in '37' else 0.0 for q")
    (directory / "reward.py").write_text(reward)
    flags = dict(algo__dynamic_filtering_enable=True, replay__ratio=1, replay__max_reuse=1)
    flags = partial.flags(directory, partial__oversample=2, **flags)
    flags += ["--algo.dynamic_filtering_range", "0", "100"]
    steps, batch, _ = recordings.train(directory, flags)
    totals = sum(map(Counter, steps), Counter())
    counted = partial.prompts_trained(batch)
    is_filtered = [n % 10 in (3, 7) for n in range(partial.NUM_PROMPTS)]
    assert totals["partial/dropped_filtered"] == sum(is_filtered) == 19
    assert not any(pipeline.CHARACTERS[prompt[2] - 3] in "37" for prompt in counted)
    # Of the other 77 the last rollout has 13, of which 8 make an optimizer step.
    assert totals["partial/dropped_left_over"] == 5 and totals["partial/dropped"] == 24
    assert totals["partial/started"] == partial.NUM_PROMPTS and totals["partial/taken"] == len(counted) == 72
    assert len(steps) == 5 and totals["replay/samples_dropped"] == 0
    assert Counter(counted.values()) == {
        partial.NUM_SAMPLES: 72 - totals["replay/groups_sampled"],
        2 * partial.NUM_SAMPLES: totals["replay/groups_sampled"],
    }
    assert totals["replay/groups_sampled"] > 0 < totals["partial/resumed"]


if __name__ == "__main__":
    _generate_greedily(Path(sys.argv[1]))
