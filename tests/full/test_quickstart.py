"""The README's example commands, as a newcomer runs them: the policy learns, the bounds move, the curves are drawn."""

import importlib
import itertools
import json
import math
import subprocess
from pathlib import Path

import pipeline
import pytest
import torch

from openrlhf_bapo.cli.plot import read_scalars


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def run(script: str, runs: Path, *flags: str, tree: Path | None = None, **environment) -> tuple[list[str], dict, Path]:
    """The lines that a script prints, the scalars that its run logged, and the run's folder."""
    tree = tree or pipeline.warm_tree()
    process = pipeline.run_script(script, *flags, tree=tree, RUNS=runs, **environment)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    lines = process.stdout.splitlines()
    picture = Path(lines[-1])
    assert picture.name == "curves.png" and picture.stat().st_size > 10_000
    assert (picture.parent / "model" / "model.safetensors").exists()
    return lines, read_scalars(picture.parent / "tensorboard"), picture.parent


def test_the_quickstart_raises_held_out_accuracy_draws_moving_bounds_and_evaluates_as_openrlhf_did(runs, monkeypatch):
    lines, scalars, folder = run("train_bapo_quickstart.sh", runs, tree=pipeline.REPOSITORY, EVAL_STEPS="60")
    steps, accuracy = scalars["eval/eval_walk_pass1"]
    assert steps[0] == 0 and 0.2 < accuracy[0] < 0.45
    # At this rate accuracy swings from step to step, once to 0.56 after the last one, where the mean reward was 0.77.
    assert accuracy[-1] > accuracy[0] + 0.1
    assert sum(scalars["train/rollout/reward_mean"][1][-20:]) / 20 > accuracy[0] + 0.25
    unbounded, share = (scalars[f"train/bapo/{name}"][1] for name in ("initial_share", "positive_share"))
    assert sum(unbounded) / 60 < 0.49 and all(before < after for before, after in zip(unbounded, share, strict=True))
    upper = scalars["train/bapo/clip_high"][1]
    assert min(upper) >= 1.2 and max(upper) <= 3.0 and max(upper) - min(upper) > 0.1
    assert all(0 < abs(before - after) < 0.3 for before, after in itertools.pairwise(upper))  # steady, and never still
    assert len(lines) < 80  # progress, and no wall of the frameworks' warnings

    monkeypatch.syspath_prepend(pipeline.REPOSITORY / "studies/late_data")
    rows = importlib.import_module("through_pipeline").rows_of(scalars)
    assert [row["rollout"] for row in rows] == list(range(1, 61))
    assert [row["upper"] for row in rows] == upper
    assert [row["reward"] for row in rows] == scalars["train/rollout/reward_mean"][1]
    assert [row["entropy"] for row in rows] == scalars["train/entropy_loss"][1]
    assert {row["staleness"] for row in rows} == {0}
    missing = {name for row in rows for name, value in row.items() if math.isnan(value)}
    assert missing == {"heldout", "pass1"} and rows[-1]["heldout"] == rows[-1]["pass1"] == accuracy[-1]

    evaluate = [pipeline.warm_tree() / ".venv/bin/openrlhf-bapo", "evaluate", "--model", folder / "model"]
    evaluate += ["--out", runs / "evaluation", "--data", runs / "start/heldout.jsonl"]
    evaluate += ["--reward", "examples/quickstart/reward.py", "--temperature", "1"]
    evaluate += ["--max_new_tokens", "40", "--n", "8"]
    process = subprocess.run(evaluate, cwd=pipeline.REPOSITORY, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]
    problems = json.loads((runs / "evaluation/results.json").read_text())["problems"]
    ours = [sum(response["reward"] for response in problem["responses"]) / 8 for problem in problems]
    assert len(ours) == 200
    # OpenRLHF's last evaluation sampled 4 responses to each of the same problems from the same weights.
    variance = sum(p * (1 - p) * 8 / 7 for p in ours) / 200
    error = math.sqrt(variance / 200 * (1 / 8 + 1 / 4))
    assert abs(sum(ours) / 200 - accuracy[-1]) < 4 * error < 0.15


def test_the_replay_example_trains_on_stale_tokens_within_the_bound_on_two_ranks(runs):
    flags = ("--actor.num_gpus_per_node", "2", "--train.micro_batch_size", "16", "--rollout.micro_batch_size", "128")
    _, scalars, _ = run("train_bapo_replay.sh", runs, *flags, STEPS="6", EVAL_STEPS="6")

    def logged(name: str) -> list[float]:
        return scalars[f"train/{name}"][1]

    assert len(logged("replay/size")) == 6
    assert logged("offpolicy/staleness_max")[0] == logged("replay/groups_sampled")[0] == 0
    assert 2 <= max(logged("offpolicy/staleness_max")) <= 4
    assert sum(number > 0 for number in logged("replay/groups_sampled")) >= 4
    assert sum(logged("replay/groups_expired") + logged("replay/groups_exhausted")) > 0
    assert set(logged("replay/samples_dropped")) == {0}
    assert set(logged("rollout/num_samples")) == {256}  # fresh samples only
    assert all(0 < mismatch < 0.1 for mismatch in logged("offpolicy/engine_mismatch"))


def test_the_command_still_makes_a_policy_like_the_one_that_comes_with_the_repository(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM

    monkeypatch.syspath_prepend(pipeline.REPOSITORY / "examples/quickstart")
    prepare = importlib.import_module("prepare")
    # Sums take a quarter of the walk's time. Of the walk, the policy that comes with it is measured.
    losses = {}
    for name, flags in {
        "sums": ["chain_sum", "--fine_tune"],
        "given sums": ["chain_sum"],
        "given walk": ["walk"],
    }.items():
        folder, task = tmp_path / name, prepare.TASKS[flags[0]]
        command = [pipeline.warm_python(), prepare.__file__, "--task", *flags, folder]
        subprocess.run(list(map(str, command)), check=True)
        problems = task.make(0)[prepare.NUM_HELDOUT :][: prepare.NUM_VALIDATION]
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        with torch.no_grad():
            sequences = prepare.encode(problems, prepare.make_tokenizer(task))
            parts = list(prepare.log_probs_of_responses(model, sequences))
        losses[name] = -float(sum(part.sum() for part in parts) / sum((part < 0).sum() for part in parts))
    for file in ("train.jsonl", "heldout.jsonl", "model/config.json", "model/tokenizer.json"):
        assert (tmp_path / "sums" / file).read_text() == (tmp_path / "given sums" / file).read_text()
    # Nats per token. Untrained policies have 2.7 and 2.9; 200 steps of the walk end at 1.137 or 1.165 by the CPU.
    assert losses["sums"] == pytest.approx(losses["given sums"], abs=0.15), losses
    assert losses["given walk"] == pytest.approx(1.15, abs=0.1), losses


def test_divisions_are_worked_out_rightly_their_lengths_have_a_heavy_tail_and_the_reward_wants_the_remainder(
    monkeypatch,
):
    monkeypatch.syspath_prepend(pipeline.REPOSITORY / "examples/quickstart")
    prepare, reward = (importlib.import_module(name) for name in ("prepare", "reward"))
    task = prepare.TASKS["remainder"]
    problems = task.make(0)
    quotients = []
    for problem in problems:
        # "79-22=" + "57-22=35-22=13-22=90", whose numbers have their units first: 97, less 22 again and again.
        *steps, rest = (problem["prompt"] + problem["response"]).split("=")
        (left, divisor), *others = [[int(number[::-1]) for number in step.split("-")] for step in steps]
        for number, again in [*others, [int(rest[::-1]), divisor]]:
            left -= divisor
            assert (left, divisor) == (number, again)
        assert 0 <= left < divisor
        quotients.append(len(steps))
    assert len({problem["prompt"] for problem in problems}) == len(problems) == 99 * 100 / 2
    for x in (2, 5, 10, 20, 50):
        assert 0.5 / x < sum(quotient >= x for quotient in quotients) / len(quotients) < 1.5 / x
    assert max(len(problem["prompt"] + problem["response"]) + 1 for problem in problems) <= task.max_length

    prompts, labels = [p["prompt"] for p in problems], [json.dumps(p["entry"]) for p in problems]

    def mean_reward(edit) -> float:
        queries = [p["prompt"] + edit(p["response"]) for p in problems]
        return reward.reward_func(queries, prompts, labels)["rewards"].mean().item()

    assert mean_reward(lambda response: response + reward.EOS) == 1
    assert mean_reward(lambda response: response.rpartition("=")[2]) == 1  # however it was found
    assert mean_reward(lambda response: response[:-2] + str((int(response[-2:]) + 1) % 100).zfill(2)) == 0
    assert mean_reward(lambda response: response + "-") == 0


def test_walks_stray_end_on_their_goal_and_are_scored_by_where_they_go(monkeypatch):
    monkeypatch.syspath_prepend(pipeline.REPOSITORY / "examples/quickstart")
    prepare, reward = (importlib.import_module(name) for name in ("prepare", "reward"))
    task = prepare.TASKS["walk"]
    problems = task.make(0)
    assert len({problem["prompt"] for problem in problems}) == len(problems) == 100 * 99
    assert max(len(problem["prompt"] + problem["response"]) for problem in problems) <= task.max_length

    def rewards(edit) -> list[float]:
        queries = [p["prompt"] + edit(p["response"]) for p in problems]
        prompts, labels = [p["prompt"] for p in problems], [json.dumps(p["entry"]) for p in problems]
        return reward.reward_func(queries, prompts, labels)["rewards"].tolist()

    shortest = [abs(int(p[0]) - int(p[3])) + abs(int(p[1]) - int(p[4])) for p in (q["prompt"] for q in problems)]
    lengths = [len(problem["response"]) for problem in problems]
    assert all(
        length == 40 or (length - least) % 2 == 0 <= length - least
        for length, least in zip(lengths, shortest, strict=True)
    )
    assert 1.5 < sum(lengths) / sum(shortest) < 3
    right = rewards(lambda moves: moves + reward.EOS)
    assert all(score == 1 for score, length in zip(right, lengths, strict=True) if length < 40)
    assert not any(rewards(lambda moves: moves))  # cut off
    one_less = rewards(lambda moves: moves[:-1] + reward.EOS)
    assert not any(less and score for less, score in zip(one_less, right, strict=True))
    assert not any(rewards(lambda moves: "U" * 10 + "D" * 10 + moves + reward.EOS))  # leaves the grid on its way
    assert not any(rewards(lambda moves: moves + "3" + reward.EOS))


def test_the_token_budgets_example_resumes_its_long_responses_and_trains_on_what_older_policies_wrote(tmp_path):
    small = dict(STEPS="6", EVAL_STEPS="6", BUDGET="16")
    _, scalars, _ = run("train_bapo_partial_quickstart.sh", tmp_path, "--eval.n_samples_per_prompt", "1", **small)

    def logged(name: str) -> list[float]:
        return scalars[f"train/{name}"][1]

    steps, accuracy = scalars["eval/eval_remainder_pass1"]
    assert steps == [0, 6] and 0.3 < accuracy[0] < 0.65
    assert sum(logged("partial/started")) == 16 * 6 == sum(logged("partial/taken")) + sum(logged("partial/dropped"))
    assert max(logged("offpolicy/staleness_max")) >= 1
    # The tail: most responses fit into one budget, some take several.
    assert max(logged("partial/segments_max")) >= 4 and min(logged("partial/segments_mean")) < 2
    assert sum(logged("partial/resumed")) > 16
