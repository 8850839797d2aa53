"""The last line of a run says how many of the planned training steps it has made, and why not all of them."""

import json
import re
from collections import Counter

import endings
import pipeline
import pytest

# A group has the rewards 0, 1, 0, 1 in some order; dynamic filtering rejects one whose rewards are all 1.
REWARD = """
from collections import Counter

import torch

calls = Counter()


def reward_func(queries, prompts, labels, **kwargs):
    (prompt,) = prompts
    calls[prompt] += 1
    return {{"rewards": torch.tensor([1.0 if {is_right} else float(calls[prompt] % 2)])}}
"""
INFINITE = """
import torch
from openrlhf_bapo import WeightRule


class Infinite(WeightRule):
    def weights(self, tokens):
        is_probe = tokens.ratio.numel() == 24  # the check of a rule before the run
        return torch.full_like(tokens.ratio, 1.0 if is_probe else torch.inf)
"""
MODES = {
    "sync": {},
    "async": dict(train__async_enable=True),
    "token budget": dict(partial__token_budget=4),
}


def run(directory, is_right: str, **changes) -> tuple[int, list[str], list[dict[str, float]]]:
    """Train on 64 prompts "a+b=", of which those with a = 5 are one token longer, in batches of 16."""
    pipeline.make_model(directory)
    prompts = [f"{n // 10}+{n % 10}=" + "=" * (n // 10 == 5) for n in range(64)]
    rows = [json.dumps({"input": prompt, "label": "0"}) + "\n" for prompt in prompts]
    (directory / "train.jsonl").write_text("".join(rows))
    (directory / "reward.py").write_text(REWARD.format(is_right=is_right))
    filtering = dict(algo__dynamic_filtering_enable=True, data__max_len=12)
    with endings.Run(directory, train__num_episodes=1, **filtering | changes) as run:
        code, lines = run.end()
    return code, lines, pipeline.steps((directory / "train.log").read_text())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_whose_groups_are_all_filtered_fails_and_says_why(tmp_path, mode):
    code, lines, steps = run(tmp_path, "True", **MODES[mode])
    assert code == 1 and not steps
    assert lines[-3].endswith(
        "openrlhf-bapo: the run has ended: nothing was trained: 0 of 4 planned training steps (dynamic filtering "
        "rejected 64 prompt groups (--algo.dynamic_filtering_range 0 1))"
    )
    assert "openrlhf-bapo: nothing is saved" in lines[-2] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", ["async", "token budget"])
def test_a_run_counts_the_groups_that_it_does_not_train_on_and_the_prompts_that_are_cut(tmp_path, mode):
    evaluation = dict(eval__dataset=tmp_path / "train.jsonl", eval__steps=2, eval__at_start=True)
    code, lines, steps = run(tmp_path, "prompt[0] in '0246'", **evaluation | MODES[mode])
    assert code == 0 and len(steps) == 2
    said = "\n".join(lines)
    # Of the 30 other groups the last batch has 14, of which 8 make an optimizer step.
    assert (
        "openrlhf-bapo: the run is complete: 2 of 4 planned training steps (dynamic filtering rejected 34 prompt "
        "groups (--algo.dynamic_filtering_range 0 1); 6 prompt groups at the end of the data fill no optimizer "
        f"step); its model is in {tmp_path}/out"
    ) in said
    assert re.findall(r"evaluation at step (\d+)", said) == ["0", "2"]  # the last one after the last step
    assert "--data.prompt_dataset: 10 of 64 prompts have more than 4 tokens (the longest 5)" in said
    rates = [step["dynamic_filtering_pass_rate"] / 100 for step in steps]
    assert all(0 < rate < 1 for rate in rates)
    if mode == "async":  # a pool judges groups before their step
        assert sum(passed / rate for passed, rate in zip((16, 14), rates, strict=True)) == pytest.approx(64)
    totals = sum((Counter(step) for step in steps), Counter())
    assert 4 <= totals["rollout/prompts_cut"] <= 10 and totals["rollout/prompts_cut"] % 1 == 0


def test_a_run_whose_updates_are_all_skipped_fails_and_says_why(tmp_path):
    (tmp_path / "rule.py").write_text(INFINITE)
    rule = dict(policy_loss=f"{tmp_path}/rule.py:Infinite", bapo__max_skipped_updates=100)
    critic = dict(algo__advantage__estimator="gae", critic__freezing_steps=1)  # steps 0 and 1
    code, lines, _ = run(tmp_path, "False", **rule | critic)
    assert code == 1
    # 16 groups of 4 samples make two optimizer steps of 32 samples.
    assert lines[-3].endswith(
        "openrlhf-bapo: the run has ended: nothing was trained: 4 of 4 planned training steps (2 of them trained the "
        "critic alone (--critic.freezing_steps); 4 of 4 optimizer steps were skipped: their loss or gradient was not "
        "finite)"
    )
