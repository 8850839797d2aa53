"""The study of late data: its training loop, tasks, tables, figures and pages."""

import itertools
import os
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache, partial
from math import inf, nan
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import compare
import other_tasks
import pandas
import pipeline
import pytest
import study
import through_pipeline
import torch
import walk
from reasoning_gym.algorithmic.jugs import min_moves_n, verify_solution
from scipy import stats

from openrlhf_bapo import ClipConfig, SmoothingConfig, SteadyBounds, find_clip_bounds, tally_contributions
from openrlhf_bapo.rules.clip_config import PRESETS

FOLDER, DOCS = compare.HERE, pipeline.REPOSITORY / "docs"
CONCLUSIONS = DOCS / "study.md", FOLDER / "README.md"
TASK = walk.Walk(num_values=5, max_tokens=9, random_moves=0.3, finetune_steps=2)
JUGS, SUMS, DETOUR = (walk.TASKS[name] for name in ("jugs", "sums", "detour"))
UP, DOWN, LEFT, RIGHT, END = range(5)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    policy = walk.Policy(TASK, width=16, num_layers=2, heads=2)
    with torch.no_grad():  # far from uniform, and ends often enough that rows finish at different steps
        policy.head.weight.mul_(8)
    return policy


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Return settings of a run of one second, with a reward that an untrained policy sometimes gets."""
    monkeypatch.setitem(walk.TASKS, "tiny", TASK)
    monkeypatch.setattr(walk.Policy.__init__, "__defaults__", (16, 2, 2))  # width, layers, heads
    monkeypatch.setattr(walk.Walk, "reward", lambda task, prompts, responses: (responses[:, 0] == UP).float())
    return walk.Run(task="tiny", lr=1e-2, prompts=4, samples=4, updates=2, rollouts=5, starts=str(tmp_path))


@pytest.fixture
def updates(monkeypatch):
    """Return a list that gets each update's rollout, its rows, and the largest change of log-probs since the start."""
    seen, train_on = [], walk.train_on

    def recording(policy, optimizer, rollout, rows, *rest):
        start = vars(rollout).get("start", rollout.log_probs)
        changes = (walk.start_log_probs(policy, rollout) - start)[walk.token_mask(rollout.responses)]
        seen.append(SimpleNamespace(rollout=rollout, rows=rows.tolist(), change=changes.abs().max().item()))
        return train_on(policy, optimizer, rollout, rows, *rest)

    monkeypatch.setattr(walk, "train_on", recording)
    return seen


@pytest.mark.parametrize(
    ("prompt", "moves", "expected"),
    [
        ([0, 0, 1, 1], [DOWN, RIGHT], 1),
        ([0, 0, 1, 1], [RIGHT, DOWN, UP, DOWN], 1),  # a detour
        ([0, 0, 1, 1], [RIGHT], 0),  # ends elsewhere
        ([0, 0, 1, 1], [UP, DOWN, DOWN, RIGHT], 0),  # leaves the grid on the way
        ([0, 0, 1, 1], [RIGHT, DOWN, RIGHT, LEFT, RIGHT, LEFT, RIGHT, LEFT], 1),  # as long as allowed
        ([0, 0, 0, 1], [RIGHT, DOWN, UP, DOWN, UP, DOWN, UP, DOWN, UP], 0),  # on the goal, but never ends
        ([0, 0, 4, 4, 2, 2], [DOWN] * 4 + [RIGHT] * 4, 1),  # along the first column and the last row, beside the block
        ([0, 0, 4, 4, 2, 2], [RIGHT] * 4 + [DOWN] * 4, 1),
        ([0, 0, 4, 4, 2, 2], [DOWN, RIGHT, RIGHT, RIGHT, RIGHT, DOWN, DOWN, DOWN], 0),  # through the block's first row
        ([0, 0, 4, 4, 2, 2], [DOWN, RIGHT, LEFT, DOWN, DOWN, DOWN, RIGHT, RIGHT, RIGHT, RIGHT], 0),  # enters its corner
    ],
)
def test_a_walk_is_right_if_it_ends_on_the_goal_within_the_grid_and_outside_the_block(prompt, moves, expected):
    task = DETOUR if len(prompt) == DETOUR.prompt_tokens else TASK
    response = torch.tensor([moves + [END] * (task.max_tokens - len(moves))])
    assert task.reward(torch.tensor([prompt]), response).tolist() == [expected]


def test_every_demonstration_that_ends_is_right():
    torch.manual_seed(0)
    prompts = walk.split_prompts(TASK)[1].repeat(20, 1)[:2000]
    responses = TASK.demonstrate(prompts)
    ended = responses[:, -1] == END
    assert 0.5 < ended.float().mean() < 1
    assert torch.equal(TASK.reward(prompts, responses), ended.float())


def test_water_jugs_are_scored_as_reasoning_gym_scores_them():
    torch.manual_seed(0)
    prompts = JUGS.prompts().repeat(2, 1)
    responses = JUGS.demonstrate(prompts)
    responses[::2] = torch.where(responses[::2] == END, END, torch.randint(JUGS.num_actions, responses[::2].shape))
    responses = torch.where(walk.token_mask(responses), responses, END)
    rewards = JUGS.reward(prompts, responses)
    assert 0.2 < rewards.mean() < 0.8
    names = {other_tasks.FILL: "fill {}", other_tasks.EMPTY: "empty {}", other_tasks.POUR: "pour {}->{}"}
    for prompt, response, right in zip(prompts.tolist(), responses.tolist(), rewards.tolist(), strict=True):
        taken = [other_tasks.ACTIONS[action] for action in response if action != END]
        moves = [names[kind].format("ABC"[jug], "ABC"[into or 0]) for kind, jug, into in taken]
        valid, _ = verify_solution({"jug_capacities": prompt[:3], "target": prompt[3]}, moves)
        assert right == (valid and response[-1] == END)


def test_water_jugs_without_random_moves_are_solved_in_the_fewest_moves():
    prompts = JUGS.prompts()
    responses = replace(JUGS, random_moves=0.0).demonstrate(prompts)
    assert JUGS.reward(prompts, responses).all()
    fewest = [min_moves_n(prompt[:3], prompt[3]) for prompt in prompts[::7].tolist()]
    assert (responses[::7] != END).sum(1).tolist() == fewest
    puzzles = itertools.product(itertools.product(range(3, 9), repeat=3), range(1, 9))
    assert len(prompts) == sum((min_moves_n(list(jugs), amount) or 0) > 1 for jugs, amount in puzzles)


def test_the_right_response_to_a_sum_is_its_decimal_digits():
    prompts = SUMS.prompts()
    responses = SUMS.demonstrate(prompts)
    for (a, b, c, d), response in zip(prompts.tolist(), responses.tolist(), strict=True):
        written = [digit + (digit >= END) for digit in map(int, str(10 * a + b + 10 * c + d))]
        assert response == written + [END] * (4 - len(written))
    assert SUMS.reward(prompts, responses).all() and not SUMS.reward(prompts, responses.roll(1, 1)).any()


def test_half_of_the_detours_are_blocked_on_the_straight_way_and_no_start_or_goal_is():
    small = replace(DETOUR, num_values=5, random_moves=0.0, straight=1.0)
    prompts = small.prompts()
    outside = (prompts[:, None, :4].view(-1, 2, 2) - prompts[:, None, 4:]).abs().amax(2) > 1
    assert outside.all() and (prompts[:, :2] != prompts[:, 2:4]).any(1).all()
    assert len(prompts.unique(dim=0)) == len(prompts)
    responses = small.demonstrate(prompts)
    path = prompts[:, None, :2] + walk.MOVES[responses].cumsum(1)
    assert torch.equal(path[:, -1], prompts[:, 2:4])
    rows = (prompts[:, 2] - prompts[:, 0]).abs()  # the goal's row first
    assert all((response[:num] < LEFT).all() for response, num in zip(responses, rows, strict=True))
    rewards = small.reward(prompts, responses)
    assert torch.equal(rewards == 0, other_tasks.is_straight_blocked(prompts)) and rewards.mean() == 0.5
    either = replace(small, straight=0.5).demonstrate(prompts)  # some go to the goal's column first
    assert not torch.equal(either, responses) and 0.5 < small.reward(prompts, either).mean() < 1


def test_no_prompt_is_both_trained_on_and_held_out():
    trained, heldout = (set(map(tuple, part.tolist())) for part in walk.split_prompts(walk.TASKS["walk"]))
    assert not trained & heldout
    assert (len(trained) + len(heldout), len(heldout)) == (100 * 99, 256)


def test_sampling_with_a_cache_gives_the_log_probs_of_the_training_forward(policy):
    rollout = walk.sample(policy, walk.split_prompts(TASK)[1][:40], TASK, samples=3)
    mask = walk.token_mask(rollout.responses)
    lengths = mask.sum(1)
    assert lengths.min() == 1 and lengths.max() == TASK.max_tokens  # finished rows left the cache during sampling
    recomputed = policy.log_probs(rollout.prompts, rollout.responses)
    torch.testing.assert_close(rollout.log_probs[mask], recomputed, atol=1e-5, rtol=0)


@pytest.fixture
def stale(policy):
    """Return a rollout of 24 rows with advantages of both signs, after which `policy` was changed."""
    rollout = walk.sample(policy, walk.split_prompts(TASK)[1][:8], TASK, samples=3)
    rollout.advantages = torch.linspace(-1, 1.5, len(rollout.rewards))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    rollout.start = walk.start_log_probs(policy, rollout) + 0.3 * torch.randn(rollout.log_probs.shape)
    return rollout


def tokens_of(policy, rollout, rows) -> SimpleNamespace:
    """Return what the rules' weights are made of, [rows, tokens]; `log_probs` has a gradient."""
    mask = walk.token_mask(rollout.responses[rows])
    flat = policy.log_probs(rollout.prompts[rows], rollout.responses[rows])
    log_probs = torch.zeros(mask.shape).masked_scatter(mask, flat)
    behavior, start = rollout.log_probs[rows] * mask, rollout.start[rows] * mask
    advantages = rollout.advantages[rows][:, None].expand(mask.shape)
    log_ratio = log_probs.detach() - behavior
    found = {"mask": mask, "log_probs": log_probs, "log_ratio": log_ratio, "ratio": log_ratio.exp()}
    found |= {"advantages": advantages, "positive": advantages > 0, "length": mask.sum(1, keepdim=True)}
    found |= {"to_start": (log_probs.detach() - start).exp(), "off": (start - behavior).exp(), "probs": behavior.exp()}
    return SimpleNamespace(**found)


def update(policy, rollout, rows, run, rule=None):
    """Do one update by plain gradient descent; return (metrics, parameters before minus parameters after)."""
    before = torch.cat([p.detach().flatten() for p in policy.parameters()]).clone()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = walk.train_on(policy, optimizer, rollout, rows, rule or walk.clip_rule(run), run)
    return metrics, before - torch.cat([p.detach().flatten() for p in policy.parameters()])


# Each rule of the tests below returns every token's weight w in the gradient w A grad log pi, and the clip bounds.
def clipped(t, lower, upper, dual_clip=0.0, ratio="ratio", weight=1.0):
    ratio = getattr(t, ratio)
    inside = torch.where(t.positive, ratio <= upper, (lower <= ratio) & (ratio <= (dual_clip or inf)))
    return weight * ratio * inside, lower, upper


def searched(t, contribution="surrogate", dual_clip=0.0, power=0):
    config = replace(ClipConfig.preset("readme"), contribution=contribution, positive_contribution_target=0.6)
    bounds = find_clip_bounds(t.ratio[t.mask], t.advantages[t.mask], t.probs[t.mask] ** power, config)
    assert (t.ratio > bounds.upper).any() and (t.ratio < bounds.lower).any()
    return clipped(t, float(bounds.lower), float(bounds.upper), dual_clip)


def tapered(t, log_ratio):
    return torch.where(t.positive, 1.0, log_ratio.exp().clamp(max=1)), nan, nan


def gspo(t):
    ratio = (t.log_ratio.sum(1, keepdim=True) / t.length).exp()
    inside = torch.where(t.positive, ratio <= 1.04, ratio >= 0.97)
    return ratio * inside / t.length * t.length.float().mean(), nan, nan


def sapo(t):
    sigma = (torch.where(t.positive, 1.0, 1.05) * (t.ratio - 1)).sigmoid()
    return 4 * sigma * (1 - sigma) * t.ratio, nan, nan


SEARCH, START = {"clip": "readme", "target": 0.6}, {"clip": "ppo", "base": "start"}
SEARCHES = [{"contribution": name, "dual_clip": c} for name in ("surrogate", "gradient") for c in (0.0, 1.3)]
RULES = [
    *((SEARCH | given, partial(searched, **given)) for given in SEARCHES),
    (SEARCH | {"token_weight": "rollout_prob"}, partial(searched, power=1)),
    ({"clip": "0.9:1.1"}, lambda t: clipped(t, 0.9, 1.1)),
    ({"clip": "none"}, lambda t: clipped(t, 1e-9, 1e9)),
    ({"clip": "a3po", "lag": 2}, lambda t: clipped(t, 0.64, 1.44)),
    ({"clip": "topr:level=token"}, lambda t: tapered(t, t.log_ratio)),
    ({"clip": "topr:level=sequence"}, lambda t: tapered(t, t.log_ratio.sum(1, keepdim=True))),
    ({"clip": "gspo"}, gspo),
    ({"clip": "sapo"}, sapo),
    ({"clip": "cispo"}, lambda t: (t.ratio.clamp(max=1.28), nan, nan)),
    ({"clip": "dis"}, lambda t: (t.ratio * (t.ratio >= 0.2) * (t.ratio <= 4), nan, nan)),
    (START, lambda t: clipped(t, 0.8, 1.2, ratio="to_start")),
    (START | {"correction": "clip"}, lambda t: clipped(t, 0.8, 1.2, 0.0, "to_start", t.off.clamp(max=2.0))),
    (
        START | {"correction": "mask"},
        lambda t: clipped(t, 0.8, 1.2, 0.0, "to_start", t.off * (t.off >= 0.5) * (t.off <= 5)),
    ),
]


@pytest.mark.parametrize(("settings", "rule"), RULES, ids=lambda value: None if callable(value) else str(value)[:80])
def test_an_update_steps_along_the_policy_gradient_with_the_rules_weights(policy, stale, settings, rule):
    run, rows = walk.Run(**settings), torch.arange(20)  # not all
    t = tokens_of(policy, stale, rows)
    weights, lower, upper = rule(t)
    weights = weights.expand(t.mask.shape)[t.mask]
    advantages, ratio, log_probs = t.advantages[t.mask], t.ratio[t.mask], t.log_probs[t.mask]
    loss = -(weights * advantages * log_probs).mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    metrics, moved = update(policy, stale, rows, run)
    torch.testing.assert_close(moved, gradient / max(gradient.norm().item(), 1), atol=1e-5, rtol=1e-3)

    expected = {"lower": lower, "upper": upper, "grad_norm": gradient.norm(), "ratio_max": ratio.max()}
    if run.base == "behavior":
        change = -weights * advantages * (log_probs - (ratio * log_probs).sum() / ratio.sum())
        expected["entropy/predicted_change"] = change.mean().detach()
    if run.base == "behavior" and not run.dual_clip:  # the shares are those of the rule alone
        size, surrogate = weights * advantages.abs(), weights * advantages
        if lower == lower:
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(lower, upper) * advantages)
        expected["share"] = size[advantages > 0].sum() / size.sum()
        for name, side in (("positive", advantages > 0), ("negative", advantages < 0)):
            expected[f"clip_{name}"] = (weights[side] == 0).float().mean()
            expected[f"eq8_{name}"] = (t.probs[t.mask] * surrogate)[side].sum().abs() / len(ratio)
    found = {name: float(metrics[name]) for name in expected}
    expected = {name: float(value) for name, value in expected.items()}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)


def test_the_start_is_the_policy_when_training_on_the_rollout_begins(tiny, updates):
    walk.train(replace(tiny, lag=1, base="start"))
    changes = [update.change for update in updates]
    assert max(changes[::2]) < 1e-5 < min(changes[1::2])  # two updates per rollout


def due(run, number: int) -> list[int]:
    """Return the rollouts, sorted by their numbers, of the rows that are trained on after rollout `number`."""
    made = []
    for n in range(number + 1):
        prompts = torch.arange(run.prompts).repeat_interleave(run.samples) + 10 * n
        made.append(SimpleNamespace(prompts=prompts, rewards=torch.full(prompts.shape, float(n))))
    parts = walk.due(made, number, run, torch.Generator().manual_seed(0))
    groups = [group.unique().numel() for part in parts for group in part.prompts.split(run.samples)]
    assert groups == [1] * len(groups)
    return sorted(int(number) for part in parts for number in part.rewards)


def test_a_rollout_or_with_mixed_each_part_of_it_is_trained_on_up_to_lag_rollouts_late(tiny):
    assert due(replace(tiny, lag=2), 1) == []
    assert due(replace(tiny, lag=2), 3) == [1] * 16
    mixed = replace(tiny, lag=2, mixed=True)  # prompts 0 and 3 wait for no rollout, 1 for one, 2 for two
    assert due(mixed, 0) == [0] * 8
    assert due(mixed, 3) == [1] * 4 + [2] * 4 + [3] * 8


def test_replay_adds_as_many_groups_of_the_rollouts_before(tiny):
    assert due(replace(tiny, replay=2), 0) == [0] * 16
    trained = due(replace(tiny, replay=2), 3)
    assert trained[16:] == [3] * 16 and set(trained[:16]) <= {1, 2}


@pytest.mark.parametrize(("num_wrong", "expected"), [(0, 0), (2, 2), (3, 3), (5, 3), (7, 3), (8, 4)])
def test_wrong_selects_half_of_the_responses_with_the_share_of_wrong_ones_if_there_are_enough(num_wrong, expected):
    rewards = torch.ones(2, 8)
    rewards[0, torch.randperm(8)[:num_wrong]] = 0
    selected = walk.select_wrong(SimpleNamespace(rewards=rewards.flatten(), row=torch.arange(16)), 0.75, 4)
    assert len(selected.row.unique()) == 8 and (selected.row // 8).tolist() == [0] * 4 + [1] * 4
    assert int((selected.rewards[:4] == 0).sum()) == expected


def test_a_run_has_fifteen_evenly_spaced_checkpoints_and_every_rollout_of_its_last_fifth(tiny):
    table = walk.train(replace(tiny, rollouts=30))
    assert [row["rollout"] for row in table if "heldout" in row] == [*range(1, 24, 2), *range(24, 30)]
    assert walk.evenly_spaced(30) == [*range(1, 30, 2)]


def test_every_method_of_a_seed_has_the_same_prompts_in_the_same_order(tiny, updates):
    for clip in ("ppo", "topr"):
        walk.train(replace(tiny, clip=clip, replay=2, lr=0.1))
    seen = [(update.rollout.prompts.tolist(), update.rows) for update in updates]
    assert seen[:10] == seen[10:] and len(seen) == 20


def test_a_run_whose_weights_are_no_longer_finite_counts_as_accuracy_0(tiny):
    rows = walk.train(replace(tiny, lr=1e38, rollouts=15))
    assert len(rows) == 15 and rows[0]["reward"] > 0
    assert [row["heldout"] for row in rows] == [0.0] * 15
    assert (rows[-1]["pass1"], rows[-1]["pass16"], rows[-1]["rollout"]) == (0, 0, 14)
    outcome = compare.outcome("walk", {name: [row.get(name, nan) for row in rows] for name in rows[-1]})
    assert outcome.accuracy == 0 and outcome.fell
    assert set(walk.train(replace(tiny, rollouts=15))[-1]) == set(rows[-1])


def test_of_selected_samples_reward_and_entropy_are_those_of_all_samples(tiny):
    all_samples, selected = (walk.train(replace(tiny, wrong=wrong, samples=n))[0] for wrong, n in ((0, 8), (0.75, 4)))
    assert (all_samples["reward"], all_samples["entropy"]) == (selected["reward"], selected["entropy"])


def test_vcpo_scales_the_learning_rate_by_the_root_of_the_effective_sample_size_of_responses(policy, stale):
    run, rows = walk.Run(clip="0.5:1.2", step="vcpo", lr=0.5), torch.arange(20)
    ratio = tokens_of(policy, stale, rows).log_ratio.sum(1).exp()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    walk.train_on(policy, optimizer, stale, rows, walk.clip_rule(run), run)
    expected = 0.5 * float(ratio.sum() / (len(ratio) * (ratio * ratio).sum()).sqrt())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("same_update", [False, True])
def test_steady_bounds_average_the_updates_before_and_with_same_update_the_current_one_too(policy, stale, same_update):
    run = walk.Run(clip="readme", contribution="gradient", half_life=3.0, same_update=same_update)
    steady, expected = walk.clip_rule(run), walk.clip_rule(run)
    config = replace(ClipConfig.preset("readme"), contribution="gradient", smoothing=SmoothingConfig(3.0))
    assert isinstance(steady, SteadyBounds) and steady.config == config
    for rows in torch.arange(24).chunk(4):
        t = tokens_of(policy, stale, rows)
        tally = tally_contributions(t.ratio, t.advantages, t.mask.float(), config)
        if same_update:
            expected.follow(tally)
        metrics, _ = update(policy, stale, rows, run, steady)
        bounds = metrics["lower"].item(), metrics["upper"].item()
        assert bounds == pytest.approx((expected.lower.item(), expected.upper.item()), abs=1e-9)
        if not same_update:
            expected.follow(tally)


def test_every_row_is_trained_on_once_per_epoch(tiny, updates):
    walk.train(replace(tiny, lag=1, epochs=2))
    of_rollouts = [[*group] for _, group in itertools.groupby(updates, lambda update: id(update.rollout))]
    assert [len(group) for group in of_rollouts] == [2 * tiny.updates] * (tiny.rollouts - 1)
    for group in of_rollouts:
        assert sorted(row for update in group for row in update.rows) == sorted([*range(16)] * 2)


def test_advantages_are_rewards_normalized_over_the_samples_of_one_prompt(tiny, updates):
    walk.train(tiny)
    kinds = set()
    for rollout in (update.rollout for update in updates):
        assert torch.equal(rollout.prompts.view(4, 4, -1), rollout.prompts.view(4, 4, -1)[:, :1].expand(4, 4, -1))
        for rewards, advantages in zip(rollout.rewards.split(4), rollout.advantages.split(4), strict=True):
            kinds.add(int(rewards.sum()))
            spread = rewards.std() or 1.0
            torch.testing.assert_close(advantages, (rewards - rewards.mean()) / spread, atol=1e-6, rtol=1e-5)
    assert kinds >= {0, 1, 2}


def test_equal_settings_give_equal_runs_whether_the_start_policy_is_made_or_loaded(tiny):
    first, again, other = (walk.train(run) for run in (tiny, tiny, replace(tiny, seed=1)))
    assert str(first) == str(again)  # compared as text, because NaN != NaN
    assert str(first) != str(other)


COLUMNS = ["rollout", "reward", *study.DETAILS, "greedy", "pass1", "pass16"]


def result(first_rollouts: float, last_rollouts: float) -> study.Columns:
    """Return a cell's result with the same numbers in all columns."""
    return {column: [first_rollouts] * 40 + [last_rollouts] * study.LAST for column in COLUMNS}


def test_the_table_has_means_over_the_last_rollouts_and_pairs_of_seeds_whose_start_policies_are_equal():
    name = "lag8-updates8-lr0.0001"
    cells = study.read_cells(FOLDER / "study.toml", f"*{name}-*")
    found = {}
    for task, seed in itertools.product(("walk", "pipeline"), (0, 1)):
        found[f"{task}-{name}-ppo-seed{seed}"] = result(0.25, 0.5)
        found[f"{task}-{name}-gradient-seed{seed}"] = result(0.25 + seed / 100, 0.75 + seed / 10)
    mean = "| gradient | 0.800 \u00b1 0.050 (2) |"
    assert mean in study.tables(cells, found, against="", details=False)
    lines = study.tables(cells, found, against="ppo", details=False)
    assert f"{mean} 0.250 (1) |" in lines  # the walk: the first rollouts of seed 1 differ
    assert f"{mean} 0.300 \u00b1 0.050 (2) |" in lines  # the pipeline: first rollouts always differ
    for method, start in (("ppo", 7.0), ("gradient", 8.0)):
        found[f"pipeline-{name}-{method}-seed1"]["start"] = [start] * (40 + study.LAST)
    assert study.tables(cells, found, against="ppo", details=False).count(f"{mean} 0.250 (1) |") == 2


def test_through_the_pipeline_pairs_have_the_same_start_policy():
    names = [f"pipeline-lag8-updates8-lr2.5e-05-{method}-seed22{n}" for method in ("ppo", "tapered") for n in range(5)]
    found = {name: study.read_parquet(FOLDER / "tapered.parquet")[names[-1]] for name in names}
    cells = {name: cell for name, cell in study.read_cells(FOLDER / "tapered.toml", "*").items() if name in names}
    for name, start in zip(names, (0, 1, 2, 3, 4, 0, 1, 7, 8, 9), strict=True):
        found[name] = found[name] | {"start": [float(start)] * len(found[name]["reward"])}
    table, _ = compare.outcomes(cells, found, compare.STAGES["pipeline"])
    assert sum("| 0.000 \u00b1 0.000 (2) |" in line for line in compare.pipeline_lines(table)) == 1


def test_the_figure_has_a_line_per_method_and_a_panel_per_setting_with_several_learning_rates(tmp_path):
    cells = study.read_cells(FOLDER / "study.toml", "walk-*")
    rewards = {"8-lr0.0001-ppo-seed0": 0.5, "8-lr0.0001-ppo-seed1": 0.7, "8-lr5e-05-ppo-seed0": 0.8}
    rewards |= {"8-lr5e-05-gradient-seed0": 0.9, "1-lr0.0001-ppo-seed0": 0.1}
    found = {f"walk-lag8-updates{name}": {column: [value] for column in COLUMNS} for name, value in rewards.items()}
    (panel,) = study.draw(cells, found, ["gradient", "ppo=PPO"], tmp_path / "study.png").axes
    assert [container.get_label() for container in panel.containers] == ["gradient", "PPO"]
    lines = [container.lines for container in panel.containers]
    assert [line.get_xydata().tolist() for line, *_ in lines] == [[[5e-5, 0.9]], [[5e-5, 0.8], [1e-4, 0.6]]]
    ends = [end for segment in lines[1][2][0].get_segments() for _, end in segment]
    assert ends == pytest.approx([0.8, 0.8, 0.5, 0.7])  # 0.6 and the error of two seeds
    assert (tmp_path / "study.png").stat().st_size > 10_000


def test_add_copies_each_finished_cell_of_the_study_into_the_results_once_and_without_loss(tmp_path):
    results, runs = tmp_path / "results.parquet", tmp_path / "runs"
    runs.mkdir()
    given = {
        "pipeline-seed0": {"rollout": [1.0], "reward": [0.7], "staleness": [8.0]},
        "walk-seed0": {"rollout": [0.0, 1.0], "reward": [0.1, 1e-9], "greedy": [nan, 0.5]},
        "walk-seed1": {"rollout": [0.0, 1.0], "reward": [0.3, 1 / 3], "greedy": [0.25, nan]},
    }
    (runs / "walk-seed2.part").write_text("rollout,reward\n0,0.1\n")  # still running, or killed
    (runs / "other.csv").write_text("rollout,reward\n0,0.1\n")  # not declared
    for name, columns in reversed(given.items()):
        rows = [columns, *zip(*columns.values(), strict=True)]
        (runs / f"{name}.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
        assert study.add(given, results, runs) == 1
    assert study.add(given, results, runs) == 0
    assert str(study.read_parquet(results)) == str(given)  # compared as text, because NaN != NaN
    assert str(study.read_results(tmp_path / "none.parquet", runs)["walk-seed1"]) == str(given["walk-seed1"])
    assert not list(tmp_path.glob("*.part"))


@cache
def planned_and_found(name: str) -> tuple[dict[str, dict], dict[str, study.Columns]]:
    """Return the cells of a plan, and those that have a result."""
    results = "results" if name == "study" else name
    return study.read_cells(FOLDER / f"{name}.toml", "*"), study.read_parquet(FOLDER / f"{results}.parquet")


@cache
def both_stages() -> tuple[compare.Table, compare.Table]:
    """Return the outcomes that are tested, and those of the screening."""
    return compare.both_stages(*planned_and_found("protocol"))


LATE, ONCE = "walk lag 8", "walk lag 0 epochs 1"


@pytest.mark.parametrize(("name", "num_cells"), [("study", 718), ("protocol", None), ("tapered", 376)])
def test_every_cell_names_a_rule_that_exists_and_every_result_is_one_of_the_cells(name, num_cells):
    cells, found = planned_and_found(name)
    assert len(cells) == (num_cells or len(found)) and found.keys() <= cells.keys()
    assert name == "tapered" or found.keys() == cells.keys()
    for cell in cells.values():
        settings = {axis: cell[axis] for axis in study.AXES if axis != "method"} | cell["regime"] | cell["flags"]
        walk.clip_rule(walk.Run(**settings))
    seeds = [cells[name]["seed"] for name in study.seed_by_seed(cells)]
    assert seeds == sorted(cell["seed"] for cell in cells.values())
    assert name == "study" or not {*seeds} & {cell["seed"] for cell in planned_and_found("study")[0].values()}


def test_every_cell_ran_with_the_bounds_or_within_the_ranges_that_the_protocol_names():
    """A target of 0.5 instead of 0.4 tells `readme` from `paper`, whose ranges are equal."""
    cells, found = planned_and_found("protocol")
    mean_upper: dict[str, dict[str, float]] = defaultdict(dict)
    for name, cell in cells.items():
        used = [[value for value in found[name].get(key, ()) if value == value] for key in ("lower", "upper")]
        if bounds := walk.fixed_bounds(cell["flags"]["clip"]):
            assert [{*values} for values in used] == [{bound} for bound in bounds]
        elif (method := cell["method"]) in PRESETS and any(used):
            config = ClipConfig.preset(cell["flags"]["clip"])
            assert config == ClipConfig.preset(method)
            for values, grid in zip(used, (config.lower_grid(), config.upper_grid()), strict=True):
                assert grid[0] <= min(values) and max(values) <= grid[-1] + 1e-9
            mean_upper[method][name.replace(method, "")] = statistics.fmean(used[1])
    shared = mean_upper["paper"].keys() & mean_upper["readme"].keys()
    assert len(shared) > 20 and all(mean_upper["paper"][cell] < mean_upper["readme"][cell] for cell in shared)


PLAIN = re.compile(r"(?<![\w.])-?\d\.\d{2,}")
WITH_ERROR = re.compile(r"-?\d\.\d{3} \u00b1 \d\.\d{3}(?: \(\d+\))?")
WITH_INTERVAL = re.compile(r"(-?\d\.\d{3}) \[(-?\d\.\d{3}), (-?\d\.\d{3})\]")


def texts(pages) -> str:
    """Return pages, or parts of them, as one line without plus signs and without a bar before an interval."""
    return " ".join(" ".join(pages).replace("+", "").replace(" | [", " [").split())


def estimates(text: str) -> set:
    """Return means with an error, and means with an interval, each also as a loss."""
    found = [tuple(map(float, numbers)) for numbers in WITH_INTERVAL.findall(text)]
    return {*WITH_ERROR.findall(text), *found, *((-mean, -high, -low) for mean, low, high in found)}


def test_every_number_of_the_conclusions_and_every_estimate_of_the_other_pages_stands_in_their_tables():
    pages = {page: page.read_text() for page in (*FOLDER.glob("*.md"), *compare.PAGES)}
    tables = [found[0] for text in pages.values() for found in compare.MARKED.finditer(text)]
    known = estimates(texts([*tables, pages[FOLDER / "TAPERED.md"], pages[FOLDER / "DETAILS.md"]]))
    assert len(known) > 100 and estimates(texts(pages.values())) <= known
    conclusions = [pages.pop(page) for page in CONCLUSIONS]
    assert {*PLAIN.findall(texts(conclusions))} <= {*PLAIN.findall(texts(pages.values()))}


def test_every_mean_with_an_error_of_the_earlier_runs_is_one_of_their_results():
    """Each is a method's reward in one setting or the difference of two methods, over the seeds in brackets or 3."""
    known = set()
    for by_lr in study.summaries(*planned_and_found("study")).values():
        of_method = [runs for by_method in by_lr.values() for runs in by_method.values()]
        groups = [[run["reward"] for run in runs.values()] for runs in of_method]
        groups += [study.differences(*pair) for pair in itertools.product(of_method, repeat=2)]
        known |= {study.mean_and_error(group) for group in groups}
    text = " ".join((FOLDER / "DETAILS.md").read_text().split())
    reported = re.findall(r"(-?\d\.\d{3} \u00b1 \d\.\d{3})(?: \((\d+)\))?", text)
    assert len(reported) > 100 and {f"{value} ({num or 3})" for value, num in reported} <= known


@pytest.mark.parametrize("page", compare.PAGES, ids=lambda page: page.name)
def test_the_pages_of_the_comparison_have_the_tables_that_the_command_writes_between_its_marks(page):
    text = page.read_text()
    emptied = compare.MARKED.sub(r"\1 -->\nold\n", text)
    assert emptied != text and "Left out" not in text
    assert compare.with_tables(emptied, *planned_and_found("protocol")) == text


def test_the_differences_intervals_and_p_values_are_those_of_scipy_from_the_rollouts():
    cells, found = planned_and_found("protocol")
    frame = pandas.DataFrame([cell | {"regime": compare.regime(cell)} for cell in cells.values()])
    fifths = ([*found[name]["heldout"]] for name in cells)
    frame["accuracy"] = [pandas.Series(values[-(len(values) // 5) :]).mean() for values in fifths]
    in_test = frame[frame.seed.isin(compare.STAGES["test"])]
    by_method = in_test.pivot(index=["regime", "seed"], columns="method", values="accuracy")
    best = frame[frame.seed.isin(compare.STAGES["screen"])].groupby(["regime", "method", "lr"]).accuracy.mean()
    for regime, method, lr in in_test[["regime", "method", "lr"]].drop_duplicates().values:
        assert regime not in best.index or lr == best[regime, method].idxmax()
    families = compare.tested(*both_stages())
    assert [len(family) for family in families.values()] == [10, 46, 11]
    for family in families.values():
        pairs = [by_method.loc[t.regime] for t in family]
        results = [stats.ttest_1samp(pair[t.method] - pair[t.other], 0) for t, pair in zip(family, pairs, strict=True)]
        p_values = [result.pvalue for result in results]
        for t, pair, result in zip(family, pairs, results, strict=True):
            # Holm: the largest of all p-values up to this one, each times the number of those that are no smaller.
            holm = max(p * sum(other >= p for other in p_values) for p in p_values if p <= result.pvalue)
            expected = (pair[t.method].mean() - pair[t.other].mean(), *result.confidence_interval(0.95), min(holm, 1))
            assert (t.difference.mean, t.difference.low, t.difference.high, t.p) == pytest.approx(expected)


def test_the_sentences_of_the_answer_hold():
    _, found = planned_and_found("protocol")
    assert not any(compare.outcome(*cell).fell for cell in found.items())
    table, screened = both_stages()
    results = compare.tested(table, screened)
    less_ppo = {(t.regime, t.method): t for t in results[compare.PRIMARY] + results[compare.OTHER_REGIMES]}
    late = [LATE, f"{LATE} wrong 0.75", "walk lag 4 epochs 4 rollouts 30", "detour lag 8"]
    assert all(t.difference.mean > 0 for key, t in less_ppo.items() if key[0] in late or key[1] == "stock_is")
    unclear = {key for key, t in less_ppo.items() if key[0] in late and t.p >= 0.05}
    assert unclear == {("detour lag 8", "decoupled"), ("walk lag 4 epochs 4 rollouts 30", "decoupled")}
    for regime in late:
        means = {m: less_ppo[regime, m].difference.mean for m in compare.tested_methods(table) if m != "decoupled"}
        assert min(means, key=means.__getitem__) == "paper"
    elsewhere = {key: t for key, t in less_ppo.items() if key[0] not in late}
    assert {key for key, t in elsewhere.items() if t.p < 0.05} == {(ONCE, "topr_sequence"), (ONCE, "balanced")}
    assert max(t.difference.high for t in elsewhere.values()) < 0.0235
    verdicts = {t.regime: compare.verdict(t.difference) for t in results[compare.OURS_AGAINST_BEST]}
    assert [name for name, found in verdicts.items() if found == "worse"] == [ONCE, "walk lag 0 epochs 8 rollouts 30"]
    assert Counter(verdicts.values()) == {"worse": 2, "not worse": 3, "undecided": 6}
    assert all(compare.best_rates(screened[LATE][m])[0] == 2.5e-5 for m in compare.tested_methods(table))


def test_what_the_page_says_of_the_pipeline_holds():
    cells, found = planned_and_found("protocol")
    table, _ = compare.outcomes(cells, found, compare.STAGES["pipeline"])
    late, fresh = (
        {method: compare.mean_accuracy(*by_rate.values()) for method, by_rate in table[name].items()}
        for name in ("pipeline lag 8", "pipeline lag 0 epochs 4 rollouts 30")
    )
    assert sorted(late, key=late.__getitem__)[:3] == ["stock", "ppo", "paper"] and len(late) == 9
    text = " ".join((DOCS / "study.md").read_text().split())
    assert f"no rule is above `ppo` by more than {max(fresh.values()) - fresh['ppo']:.3f}" in text
    tapered = (FOLDER / "TAPERED.md").read_text().partition("pipeline, late by 8")[2].splitlines()
    less = [line.split("|")[4].strip() for line in tapered if line.startswith("| tapered |")]
    assert f"from other start policies `tapered` {less[0]}." in text
    assert f"of 8 `tapered` has {less[1]}, with async training {less[2]}." in text
    for name in [name for name in cells if name.startswith("pipeline")]:
        lag = cells[name]["lag"]
        assert found[name]["staleness"] == [float(min(n, lag)) for n in range(60 if lag else 30)]


def test_a_method_that_lacks_a_planned_cell_is_left_out_and_named_and_nothing_is_tested(monkeypatch, tmp_path):
    cells, found = planned_and_found("protocol")
    missing = "walk-lag8-updates8-lr2.5e-05-ppo-seed200"
    *lines, last = compare.stage_lines("screen", cells, {name: found[name] for name in found if name != missing})
    of_ppo = [line for line in compare.stage_lines("screen", cells, found) if line not in lines]
    assert last == f"Left out: ppo in {LATE}, which lacks 1 of 15 cells."
    assert of_ppo[0].startswith("| ppo | 0.740") and of_ppo[1].startswith("late by 8: less ppo")
    nothing = ["--results", str(tmp_path / "none"), "--runs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["compare.py", "test", *nothing])
    with pytest.raises(SystemExit, match=r"No test before every planned cell is there\.\nLeft out: ppo in "):
        compare.main()


def with_accuracy(*values: float) -> dict[int, compare.Outcome]:
    return {seed: compare.Outcome(value, value, 0.5, 1.0, False, (0.1, 1.0)) for seed, value in enumerate(values)}


def test_methods_with_other_seeds_or_start_policies_are_not_compared_and_equal_ones_do_not_differ():
    ours, theirs = with_accuracy(0.6, 0.8), with_accuracy(0.5, 0.6)
    assert compare.difference(ours, ours) == compare.Difference(0.0, 0.0, 0.0, 1.0)
    for other in (theirs | {1: replace(theirs[1], began=(0.2, 1.0))}, {0: theirs[0]}):
        with pytest.raises(ValueError, match="different seeds, or a seed has two start policies"):
            compare.difference(ours, other)
    with pytest.raises(ValueError, match="not a number"):
        compare.holm([0.04, nan])


def test_the_leaders_are_the_best_of_each_kind_beside_the_rules_that_are_always_tested():
    ranked = [(m, 0.0) for m in ("topr", "m2", "topr_sequence", "readme", "cispo", "dis", "balanced", "steady")]
    assert compare.leaders(ranked)[3:] == ["topr", "m2", "readme", "cispo", "balanced"]  # one of ours is among them


def test_the_picture_has_a_panel_per_regime_with_each_methods_interval_and_a_dot_if_it_is_significant(tmp_path):
    table, screened = both_stages()
    figure = compare.draw(table, screened, tmp_path / "study.png")
    methods = compare.tested_methods(table)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == methods
    results = compare.against_ppo(table, screened)
    for name, panel in zip(table, figure.axes, strict=True):
        here = [(methods.index(t.method), t.difference, t.p) for t in results if t.regime == name]
        expected = [line for row, d, _ in here for line in ([[d.low, row], [d.high, row]], [[d.mean, row]])]
        assert panel.get_title().replace("\n", ", ") == compare.label(name)
        assert [line.get_xydata().tolist() for line in panel.lines[:-1]] == expected  # the last one is that of zero
        assert [line.get_marker() for line in panel.lines[1:-1:2]] == ["o" if p < 0.05 else "|" for *_, p in here]
    assert (tmp_path / "study.png").stat().st_size > 0


@pytest.fixture(scope="module")
def training_flags(tmp_path_factory) -> list[str]:
    return pipeline.flags(pipeline.make_model(tmp_path_factory.mktemp("model")))


DECOUPLED = {"offpolicy.objective": "decoupled"}
FOUND = {"bapo.contribution": "surrogate", "bapo.positive_contribution_target": 0.5, "bapo.smoothing": 0}
CLIP = "actor.eps_clip_low_high"


@pytest.mark.parametrize(
    ("given", "method", "expected"),
    [
        ({"clip": "0.76:2.36", "dual_clip": 3.0}, "grpo", {CLIP: [0.24, 1.36], "actor.dual_clip": 3}),
        ({"clip": "ppo", "lag": 0}, "grpo", {CLIP: [0.2, 0.2], "actor.dual_clip": None, "offpolicy.lag": 0}),
        ({"clip": "ppo", "base": "start"}, "stock", {"train.seed": 3, "actor.adam.lr": 2e-4, "offpolicy.lag": 8}),
        ({"clip": "ppo", "base": "start", "correction": "mask"}, "stock_is", {CLIP: [0.2, 0.2]}),
        ({"clip": "ppo", "base": "start", "correction": "clip"}, "grpo", DECOUPLED),
        ({"clip": "paper", "base": "start", "correction": "clip"}, "bapo paper", DECOUPLED),
        ({"clip": "readme"}, "bapo readme", FOUND),
        (
            {"clip": "readme", "contribution": "gradient", "target": 0.45, "half_life": 22.8},
            "bapo readme",
            dict(zip(FOUND, ("gradient", 0.45, 22.8), strict=True)),
        ),
        ({"clip": "readme", "task": "pipeline_replay", "lag": 0}, "bapo readme", {"replay.ratio": 1}),
        ({"clip": "readme", "task": "pipeline_partial", "lag": 0}, "bapo readme", {"partial.token_budget": 8}),
        ({"clip": "ppo", "task": "pipeline_async", "lag": 0}, "grpo", {"train.async_enable": True}),
        ({"clip": "paper", "token_weight": "rollout_prob"}, "bapo paper", {"bapo.token_weight": "rollout_prob"}),
        ({"clip": "topr:level=sequence"}, "topr", {"topr.level": "sequence"}),
    ],
)
def test_a_pipeline_cell_names_its_method_and_gives_the_training_command_the_same_settings(
    training_flags, given, method, expected
):
    run = walk.Run(**{"task": "pipeline", "seed": 3, "lr": 2e-4, "lag": 8} | given)
    variables, _ = through_pipeline.method_of(run)
    assert " ".join(variables.values()) == method
    rule, *preset = method.split()
    words = ["--policy_loss", "ppo" if rule in ("grpo", "stock", "stock_is") else rule]
    words += ["--bapo.preset", *preset] if preset else []
    args = pipeline.parse([*training_flags, *words, *through_pipeline.flags_of(run)])
    for name, value in expected.items():
        assert attrgetter(name)(args) == (value if value is None or isinstance(value, str) else pytest.approx(value))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"clip": "gspo"}, "--clip gspo"),
        ({"clip": "paper", "base": "start"}, "--base start .* paper"),
        ({"clip": "0.5:1.2", "step": "vcpo"}, "--step vcpo"),
        ({"clip": "ppo", "mixed": True}, "--mixed True"),
    ],
)
def test_a_pipeline_cell_with_a_setting_that_the_pipeline_lacks_is_refused(given, named):
    with pytest.raises(ValueError, match=named):
        through_pipeline.method_of(walk.Run(**given))


def test_an_undefined_method_in_study_toml_is_refused_by_name(tmp_path):
    text = (FOLDER / "study.toml").read_text().replace("ppo_dual = {", "ppo_duel = {")
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(ValueError, match="method ppo_dual is not among ppo, ppo_duel, "):
        study.read_cells(tmp_path / "study.toml", "*")


def test_every_flag_in_the_studys_readme_exists():
    commands = re.findall(r"^\.venv/bin/python (\S+) (.*)$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert {Path(file).name for file, _ in commands} == {"walk.py", "other_tasks.py", "study.py"}
    run = subprocess.run([sys.executable, FOLDER / "study.py", "--help"], capture_output=True, text=True, check=True)
    for file, words in commands:
        known = re.findall(r"--(\w+)", run.stdout) if file.endswith("study.py") else vars(walk.Run())
        assert {*re.findall(r"--(\w+)", words)} <= {*known}


START_POLICY = """
import sys, torch, walk
torch.set_num_threads(1)
policy = walk.start_policy(walk.Run(seed=3, starts=sys.argv[1]), walk.Walk(10, 8, 0.35, 15))
torch.save(policy.state_dict(), sys.argv[1] + ".pt")
"""


def test_other_kinds_of_processors_make_the_walks_start_policy_alike(tmp_path):
    path = os.pathsep.join([str(FOLDER), str(pipeline.REPOSITORY)])
    for kind in ("default", "avx2"):
        environment = os.environ | {"ATEN_CPU_CAPABILITY": kind, "PYTHONPATH": path}
        subprocess.run([sys.executable, "-c", START_POLICY, str(tmp_path / kind)], env=environment, check=True)
    one, other = (torch.load(tmp_path / f"{kind}.pt") for kind in ("default", "avx2"))
    for name, values in one.items():
        torch.testing.assert_close(values, other[name], rtol=0, atol=1e-6)
