"""The study of late data: its training loop, tasks, tables, figure and results."""

import importlib.util
import itertools
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from math import nan
from pathlib import Path
from types import SimpleNamespace

import pipeline
import pytest
import torch
from pipeline import REPOSITORY
from reasoning_gym.algorithmic.jugs import min_moves_n, verify_solution

from openrlhf_bapo import (
    ClipConfig,
    FixedBounds,
    SmoothingConfig,
    SteadyBounds,
    find_clip_bounds,
    tally_contributions,
)

FOLDER = REPOSITORY / "studies" / "late_data"
CONCLUSIONS = REPOSITORY / "docs" / "study.md", FOLDER / "README.md"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


load("rivals")  # which walk imports
walk, study = load("walk"), load("study")
other_tasks, through_pipeline = load("other_tasks"), load("through_pipeline")  # both import walk
compare = load("compare")  # which imports study
TASK = walk.Walk(num_values=5, max_tokens=9, random_moves=0.3, finetune_steps=2)
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


def with_advantages(rollout):
    """Give a rollout advantages of both signs, whatever its rewards."""
    rollout.advantages = torch.linspace(-1, 1.5, len(rollout.rewards))
    return rollout


@pytest.mark.parametrize(
    ("goal", "tokens", "expected"),
    [
        ([1, 1], [DOWN, RIGHT, END], 1),
        ([1, 1], [RIGHT, DOWN, UP, DOWN, END], 1),  # a detour
        ([1, 1], [RIGHT, END], 0),  # ends elsewhere
        ([1, 1], [UP, DOWN, DOWN, RIGHT, END], 0),  # leaves the grid on the way
        ([1, 1], [RIGHT, DOWN, RIGHT, LEFT, RIGHT, LEFT, RIGHT, LEFT, END], 1),  # as long as allowed
        ([0, 1], [RIGHT, DOWN, UP, DOWN, UP, DOWN, UP, DOWN, UP], 0),  # on the goal, but never ends
    ],
)
def test_a_walk_is_right_if_it_ends_on_the_goal_within_the_grid(goal, tokens, expected):
    response = torch.tensor([tokens + [END] * (TASK.max_tokens - len(tokens))])
    assert TASK.reward(torch.tensor([[0, 0, *goal]]), response).tolist() == [expected]


def test_every_demonstration_that_ends_is_right():
    torch.manual_seed(0)
    prompts = walk.split_prompts(TASK)[1].repeat(20, 1)[:2000]
    responses = TASK.demonstrate(prompts)
    ended = responses[:, -1] == END
    assert 0.5 < ended.float().mean() < 1
    assert torch.equal(TASK.reward(prompts, responses), ended.float())


JUGS = walk.TASKS["jugs"]


def test_water_jugs_are_scored_as_reasoning_gym_scores_them():
    torch.manual_seed(0)
    prompts = JUGS.prompts().repeat(2, 1)
    responses = JUGS.demonstrate(prompts)
    responses[::2] = torch.where(responses[::2] == END, END, torch.randint(JUGS.num_actions, responses[::2].shape))
    responses = torch.where(walk.token_mask(responses), responses, END)
    rewards = JUGS.reward(prompts, responses).tolist()
    assert 0.2 < sum(rewards) / len(rewards) < 0.8
    names = {other_tasks.FILL: "fill {}", other_tasks.EMPTY: "empty {}", other_tasks.POUR: "pour {}->{}"}
    for prompt, response, right in zip(prompts.tolist(), responses.tolist(), rewards, strict=True):
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
    assert min(fewest) == 2
    assert len(prompts) == sum(
        (min_moves_n(list(jugs), amount) or 0) > 1
        for jugs in itertools.product(range(3, 9), repeat=3)
        for amount in range(1, 9)
    )


def test_the_right_response_to_a_sum_is_its_decimal_digits():
    sums = walk.TASKS["sums"]
    prompts = sums.prompts()
    responses = sums.demonstrate(prompts)
    for (a, b, c, d), response in zip(prompts.tolist(), responses.tolist(), strict=True):
        written = [digit + (digit >= END) for digit in map(int, str(10 * a + b + 10 * c + d))]
        assert response == written + [END] * (4 - len(written))
    assert sums.reward(prompts, responses).all()
    assert not sums.reward(prompts, responses.roll(1, 1)).any()


DETOUR = walk.TASKS["detour"]


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([DOWN] * 4 + [RIGHT] * 4, 1),  # along the first column and the last row, beside the block
        ([RIGHT] * 4 + [DOWN] * 4, 1),
        ([DOWN, RIGHT, RIGHT, RIGHT, RIGHT, DOWN, DOWN, DOWN], 0),  # through the block's first row
        ([DOWN, RIGHT, LEFT, DOWN, DOWN, DOWN, RIGHT, RIGHT, RIGHT, RIGHT], 0),  # enters its corner and leaves it
        ([RIGHT] * 4 + [DOWN] * 3, 0),  # ends elsewhere
    ],
)
def test_a_detour_is_right_if_it_also_never_enters_the_block(moves, expected):
    response = torch.tensor([moves + [END] * (DETOUR.max_tokens - len(moves))])
    assert DETOUR.reward(torch.tensor([[0, 0, 4, 4, 2, 2]]), response).tolist() == [expected]


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
    assert len(trained) + len(heldout) == 100 * 99
    assert len(heldout) == 256


def test_sampling_with_a_cache_gives_the_log_probs_of_the_training_forward(policy):
    rollout = walk.sample(policy, walk.split_prompts(TASK)[1][:40], TASK, samples=3)
    mask = walk.token_mask(rollout.responses)
    lengths = mask.sum(1)
    assert lengths.min() == 1 and lengths.max() == TASK.max_tokens  # finished rows left the cache during sampling
    recomputed = policy.log_probs(rollout.prompts, rollout.responses)
    torch.testing.assert_close(rollout.log_probs[mask], recomputed, atol=1e-5, rtol=0)


def test_greedy_sampling_takes_the_likeliest_token(policy):
    rollout = walk.sample(policy, walk.split_prompts(TASK)[1][:10], TASK, greedy=True)
    tokens = torch.cat([TASK.num_actions + rollout.prompts, rollout.responses[:, :-1]], 1)
    likeliest = policy(tokens)[:, TASK.prompt_tokens - 1 :].argmax(2)
    mask = walk.token_mask(rollout.responses)
    assert torch.equal(rollout.responses[mask], likeliest[mask])


def reference_gradient(policy, rollout, rows, lower, upper, dual_clip):
    """Return the gradient of PPO's loss over the rows' tokens, computed token by token from its definition."""
    gains = []
    for row in rows.tolist():
        num = int(walk.token_mask(rollout.responses[row : row + 1]).sum())
        new = policy.log_probs(rollout.prompts[row : row + 1], rollout.responses[row : row + 1])
        advantage = float(rollout.advantages[row])
        for t in range(num):
            ratio = (new[t] - rollout.log_probs[row, t]).exp()
            gain = min(ratio * advantage, ratio.clamp(lower, upper) * advantage)
            if dual_clip and advantage < 0 and gain < dual_clip * advantage:
                gain = gain * 0
            gains.append(gain)
    loss = -sum(gains) / len(gains)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])


@pytest.fixture
def stale(policy):
    """Return a rollout of 24 rows, after which `policy` was changed."""
    rollout = with_advantages(walk.sample(policy, walk.split_prompts(TASK)[1][:8], TASK, samples=3))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return rollout


def update(policy, rollout, rows, run, rule=None):
    """Do one update by plain gradient descent; return (metrics, parameters before minus parameters after)."""
    before = torch.cat([p.detach().flatten() for p in policy.parameters()]).clone()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    metrics = walk.train_on(policy, optimizer, rollout, rows, rule or walk.clip_rule(run), run)
    return metrics, before - torch.cat([p.detach().flatten() for p in policy.parameters()])


def ratios(policy, rollout, rows):
    """Return importance ratios and advantages of the rows' tokens, flat."""
    mask = walk.token_mask(rollout.responses[rows])
    log_probs = policy.log_probs(rollout.prompts[rows], rollout.responses[rows]).detach()
    advantages = rollout.advantages[rows].repeat_interleave(mask.sum(1))
    return (log_probs - rollout.log_probs[rows][mask]).exp(), advantages


@pytest.mark.parametrize("dual_clip", [0.0, 1.3])
@pytest.mark.parametrize("contribution", ["surrogate", "gradient"])
def test_an_update_steps_along_the_clipped_surrogate_between_the_bounds_of_the_core(
    policy, stale, contribution, dual_clip
):
    run = walk.Run(clip="readme", contribution=contribution, target=0.6, dual_clip=dual_clip)
    rows = torch.arange(20)  # not all
    ratio, advantages = ratios(policy, stale, rows)
    bounds = find_clip_bounds(ratio, advantages, torch.ones_like(ratio), walk.clip_rule(run).config)
    assert (ratio > bounds.upper).any() and (ratio < bounds.lower).any()
    gradient = reference_gradient(policy, stale, rows, float(bounds.lower), float(bounds.upper), dual_clip)
    log_probs = policy.log_probs(stale.prompts[rows], stale.responses[rows]).detach()
    change = -ratio * advantages * (log_probs - (ratio * log_probs).sum() / ratio.sum()) / len(ratio)
    trained = torch.where(
        advantages > 0, ratio <= bounds.upper, (bounds.lower <= ratio) & (ratio <= (dual_clip or 9e9))
    )

    metrics, moved = update(policy, stale, rows, run)
    assert (metrics["lower"], metrics["upper"]) == (bounds.lower, bounds.upper)
    assert metrics["grad_norm"].item() == pytest.approx(gradient.norm().item(), rel=1e-4)
    torch.testing.assert_close(moved, gradient / max(gradient.norm().item(), 1), atol=1e-5, rtol=1e-3)
    if contribution == "gradient":
        assert metrics["share"].item() == pytest.approx(bounds.positive_share.item(), abs=1e-5)
    assert metrics["clip_positive"].item() == pytest.approx(bounds.clip_frac_positive.item(), abs=1e-6)
    assert metrics["clip_negative"].item() == pytest.approx(bounds.clip_frac_negative.item(), abs=1e-6)
    assert metrics["entropy/predicted_change"].item() == pytest.approx(change[trained].sum().item(), abs=1e-5)


@pytest.mark.parametrize("clip", ["0.9:1.1", "topr:level=token"])
def test_the_terms_of_eq_8_are_the_surrogate_weighted_by_the_behavior_policys_probability(policy, stale, clip):
    rows = torch.arange(20)
    ratio, advantages = ratios(policy, stale, rows)
    probs = stale.log_probs[rows][walk.token_mask(stale.responses[rows])].exp()
    if clip.startswith("topr"):
        surrogate = advantages * torch.where(advantages > 0, 1.0, ratio.clamp(max=1.0))
    else:
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    metrics, _ = update(policy, stale, rows, walk.Run(clip=clip))
    for name, side in (("eq8_positive", advantages > 0), ("eq8_negative", advantages < 0)):
        expected = (probs * surrogate)[side].sum().abs() / len(ratio)
        torch.testing.assert_close(metrics[name], expected, atol=1e-6, rtol=1e-4)


def test_rollout_prob_weighs_tokens_in_the_search_alone(policy, stale):
    rows = torch.arange(20)
    ratio, advantages = ratios(policy, stale, rows)
    probs = stale.log_probs[rows][walk.token_mask(stale.responses[rows])].exp()
    run = walk.Run(clip="readme", target=0.4, token_weight="rollout_prob")
    bounds, *others = (find_clip_bounds(ratio, advantages, probs**n, walk.clip_rule(run).config) for n in (1, 0, 2))
    assert all((bounds.lower, bounds.upper) != (other.lower, other.upper) for other in others)
    gradient = reference_gradient(policy, stale, rows, float(bounds.lower), float(bounds.upper), 0.0)
    metrics, moved = update(policy, stale, rows, run)
    assert (metrics["lower"], metrics["upper"]) == (bounds.lower, bounds.upper)
    torch.testing.assert_close(moved, gradient / max(gradient.norm().item(), 1), atol=1e-5, rtol=1e-3)


def weighted_gradient(policy, rollout, rows, weight_of) -> torch.Tensor:
    """Return the gradient of the mean of w A log pi over all tokens, in a plain loop; `weight_of` gives w per token."""
    gains, num = [], 0
    for row in rows.tolist():
        length = int(walk.token_mask(rollout.responses[row : row + 1]).sum())
        new = policy.log_probs(
            rollout.prompts[row : row + 1].repeat(4, 1), rollout.responses[row : row + 1].repeat(4, 1)
        )
        new = new[:length]
        weights = weight_of(row, new.detach(), rollout.log_probs[row, :length], float(rollout.advantages[row]))
        gains.append((weights * float(rollout.advantages[row]) * new).sum())
        num += length
    loss = -sum(gains) / num
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])


def tapered(row, new, old, advantage):
    return torch.ones_like(new) if advantage > 0 else (new - old).exp().clamp(max=1)


def tapered_by_response(row, new, old, advantage):
    return torch.ones_like(new) if advantage > 0 else (new - old).sum().exp().clamp(max=1).expand_as(new)


def geometric_mean_inside(row, new, old, advantage):
    ratio = (new - old).mean().exp()
    return (ratio * (ratio <= 1.04 if advantage > 0 else ratio >= 0.97) / len(new)).expand_as(new)


@pytest.mark.parametrize(
    ("clip", "weight_of"),
    [
        ("topr:level=token", tapered),
        ("topr:level=sequence", tapered_by_response),
        ("gspo", geometric_mean_inside),
        ("cispo", lambda row, new, old, advantage: (new - old).exp().clamp(max=1.28)),
        ("dis", lambda row, new, old, advantage: (r := (new - old).exp()) * (r >= 0.2) * (r <= 4)),
    ],
)
def test_a_rule_with_weights_steps_along_its_weighted_policy_gradient(policy, stale, clip, weight_of):
    rows = torch.arange(20)
    gradient = weighted_gradient(policy, stale, rows, weight_of)
    if clip == "gspo":  # a mean per response
        gradient *= walk.token_mask(stale.responses[:20]).sum() / 20
    metrics, moved = update(policy, stale, rows, walk.Run(clip=clip))
    torch.testing.assert_close(moved, gradient / max(gradient.norm().item(), 1), atol=1e-5, rtol=1e-3)
    assert metrics["lower"].isnan() and metrics["upper"].isnan()


@pytest.mark.parametrize("correction", ["", "clip", "mask"])
def test_with_base_start_the_clip_is_on_the_ratio_to_the_start_and_the_correction_is_a_weight(
    policy, stale, correction
):
    stale.start = walk.start_log_probs(policy, stale) + 0.3 * torch.randn(stale.log_probs.shape)

    def weight_of(row, new, old, advantage):
        start = stale.start[row, : len(new)]
        ratio, off = (new - start).exp(), (start - old).exp()
        weights = {"": torch.ones_like(off), "clip": off.clamp(max=2.0), "mask": off * ((off >= 0.5) & (off <= 5))}
        inside = ratio <= 1.2 if advantage > 0 else ratio >= 0.8
        return weights[correction] * ratio * inside

    rows = torch.arange(20)
    gradient = weighted_gradient(policy, stale, rows, weight_of)
    _, moved = update(policy, stale, rows, walk.Run(clip="ppo", base="start", correction=correction))
    torch.testing.assert_close(moved, gradient / max(gradient.norm().item(), 1), atol=1e-5, rtol=1e-3)


def test_the_start_is_the_policy_when_training_on_the_rollout_begins(tiny, monkeypatch):
    first_ratios = []
    train_on = walk.train_on

    def recording(policy, optimizer, rollout, rows, *rest):
        mask = walk.token_mask(rollout.responses)
        now = walk.start_log_probs(policy, rollout)
        first_ratios.append((now - rollout.start)[mask].abs().max().item())
        return train_on(policy, optimizer, rollout, rows, *rest)

    monkeypatch.setattr(walk, "train_on", recording)
    walk.train(replace(tiny, lag=1, base="start"))
    assert max(first_ratios[::2]) < 1e-5 < min(first_ratios[1::2])  # two updates per rollout


def test_a_mixed_lag_trains_each_part_of_a_rollout_once_up_to_lag_rollouts_late(tiny):
    run = replace(tiny, lag=2, mixed=True)
    made = [rollout_of(run, number) for number in range(4)]
    trained = [[int(x) for part in due(made[: n + 1], n, run) for x in part.rewards] for n in range(4)]
    # Prompts 0 and 3 wait for no rollout, 1 for one, 2 for two.
    assert trained[0] == [0] * 8
    assert sorted(trained[3]) == [1] * 4 + [2] * 4 + [3] * 8


def test_replay_adds_as_many_groups_of_the_rollouts_before(tiny):
    run = replace(tiny, replay=2)
    made = [rollout_of(run, number) for number in range(4)]
    assert len(due(made[:1], 0, run)) == 1
    fresh, past = due(made, 3, run)
    assert fresh is made[3] and set(past.rewards.tolist()) <= {1.0, 2.0} and len(past.rewards) == 16
    assert torch.equal(past.prompts.view(4, 4, -1), past.prompts.view(4, 4, -1)[:, :1].expand(4, 4, -1))


def due(made: list, number: int, run: walk.Run) -> list:
    return walk.due(made, number, run, torch.Generator().manual_seed(0))


def rollout_of(run, number: int):
    """Return a rollout whose rewards are its number."""
    rows = run.prompts * run.samples
    prompts = torch.arange(run.prompts).repeat_interleave(run.samples)[:, None] + 10 * number
    return SimpleNamespace(prompts=prompts, rewards=torch.full((rows,), float(number)))


@pytest.mark.parametrize(("num_wrong", "expected"), [(0, 0), (2, 2), (3, 3), (5, 3), (7, 3), (8, 4)])
def test_wrong_selects_half_of_the_responses_with_the_share_of_wrong_ones_if_there_are_enough(num_wrong, expected):
    rewards = torch.ones(2, 8)
    rewards[0, torch.randperm(8)[:num_wrong]] = 0
    rollout = SimpleNamespace(rewards=rewards.flatten(), row=torch.arange(16))
    selected = walk.select_wrong(rollout, 0.75, 4)
    assert len(selected.row.unique()) == 8 and (selected.row // 8).tolist() == [0] * 4 + [1] * 4
    assert int((selected.rewards[:4] == 0).sum()) == expected


def test_a_run_has_fifteen_evenly_spaced_checkpoints_and_every_rollout_of_its_last_fifth(tiny):
    table = walk.train(replace(tiny, rollouts=30))
    measured = [row["rollout"] for row in table if "heldout" in row]
    assert measured == [*range(1, 24, 2), *range(24, 30)]
    assert walk.evenly_spaced(30) == [*range(1, 30, 2)]


def test_every_method_of_a_seed_has_the_same_prompts_in_the_same_order(tiny, monkeypatch):
    seen = []
    train_on = walk.train_on

    def recording(policy, optimizer, rollout, rows, *rest):
        seen[-1].append((rollout.prompts.tolist(), rows.tolist()))
        return train_on(policy, optimizer, rollout, rows, *rest)

    monkeypatch.setattr(walk, "train_on", recording)
    for clip in ("ppo", "topr"):
        seen.append([])
        walk.train(replace(tiny, clip=clip, replay=2, lr=0.1))
    assert seen[0] == seen[1] and len(seen[0]) == 10


def test_a_run_whose_weights_are_no_longer_finite_counts_as_accuracy_0(tiny):
    rows = walk.train(replace(tiny, lr=1e38, rollouts=15))
    assert len(rows) == 15 and rows[0]["reward"] > 0
    assert [row["heldout"] for row in rows] == [0.0] * 15
    assert (rows[-1]["pass1"], rows[-1]["pass16"], rows[-1]["rollout"]) == (0, 0, 14)
    columns = {name: [row.get(name, nan) for row in rows] for name in rows[-1]}
    assert compare.outcome(columns).accuracy == 0 and compare.outcome(columns).fell
    assert set(walk.train(replace(tiny, rollouts=15))[-1]) == set(rows[-1])


def test_of_selected_samples_reward_and_entropy_are_those_of_all_samples(tiny):
    all_samples, selected = (walk.train(replace(tiny, wrong=wrong, samples=n))[0] for wrong, n in ((0, 8), (0.75, 4)))
    assert (all_samples["reward"], all_samples["entropy"]) == (selected["reward"], selected["entropy"])


def test_vcpo_scales_the_learning_rate_by_the_root_of_the_effective_sample_size_of_responses(policy, stale):
    run = walk.Run(clip="0.5:1.2", step="vcpo", lr=0.5)
    mask = walk.token_mask(stale.responses[:20])
    of_tokens = ((walk.start_log_probs(policy, stale) - stale.log_probs)[:20] * mask).sum(1)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    walk.train_on(policy, optimizer, stale, torch.arange(20), walk.clip_rule(run), run)
    ratio = of_tokens.exp()
    expected = 0.5 * float(ratio.sum() / (len(ratio) * (ratio * ratio).sum()).sqrt())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-5)


def test_the_protocols_cells_use_no_seed_of_the_study_and_name_rules_that_exist():
    planned = study.read_cells(FOLDER / "protocol.toml", "*")
    used = {cell["seed"] for cell in study.read_cells(FOLDER / "study.toml", "*").values()}
    assert not used & {cell["seed"] for cell in planned.values()}
    for cell in planned.values():
        walk.clip_rule(walk.Run(**cell["regime"] | cell["flags"]))


@pytest.mark.parametrize("same_update", [False, True])
def test_steady_bounds_average_the_updates_before_and_with_same_update_the_current_one_too(policy, stale, same_update):
    run = walk.Run(clip="readme", contribution="gradient", half_life=3.0, same_update=same_update)
    steady, expected = walk.clip_rule(run), walk.clip_rule(run)
    config = replace(ClipConfig.preset("readme"), contribution="gradient", smoothing=SmoothingConfig(3.0))
    assert isinstance(steady, SteadyBounds) and steady.config == config
    for rows in torch.arange(24).chunk(4):
        ratio, advantages = ratios(policy, stale, rows)
        tally = tally_contributions(ratio, advantages, torch.ones_like(ratio), config)
        if same_update:
            expected.follow(tally)
        metrics, _ = update(policy, stale, rows, run, steady)
        assert metrics["lower"].item() == pytest.approx(expected.lower.item(), abs=1e-9)
        assert metrics["upper"].item() == pytest.approx(expected.upper.item(), abs=1e-9)
        if not same_update:
            expected.follow(tally)


@pytest.mark.parametrize("lag", [0, 3])
def test_every_row_is_trained_on_once_per_epoch_and_lag_rollouts_after_it_was_made(tiny, monkeypatch, lag):
    made, trained = [], []  # rollouts; (number of the newest rollout, number of the trained one, its rows)
    sample, train_on = walk.sample, walk.train_on

    def recording_sample(policy, prompts, task, samples=1, **settings):
        rollout = sample(policy, prompts, task, samples, **settings)
        if samples == tiny.samples:  # otherwise it is an evaluation
            made.append(rollout)
        return rollout

    def recording_train_on(policy, optimizer, rollout, rows, *rest):
        number = next(i for i, other in enumerate(made) if other is rollout)
        trained.append((len(made) - 1, number, rows.tolist()))
        return train_on(policy, optimizer, rollout, rows, *rest)

    monkeypatch.setattr(walk, "sample", recording_sample)
    monkeypatch.setattr(walk, "train_on", recording_train_on)
    walk.train(replace(tiny, lag=lag, epochs=2))

    assert all(now - number == lag for now, number, _ in trained)
    for number in range(tiny.rollouts - lag):
        rows = [rows for _, trained_on, rows in trained if trained_on == number]
        assert len(rows) == 2 * tiny.updates
        assert sorted(itertools.chain.from_iterable(rows)) == sorted(2 * list(range(tiny.prompts * tiny.samples)))
    assert len(made) == tiny.rollouts


def test_advantages_are_rewards_normalized_over_the_samples_of_one_prompt(tiny, monkeypatch):
    seen = []
    monkeypatch.setattr(walk, "train_on", lambda policy, optimizer, rollout, *rest: seen.append(rollout) or {})
    walk.train(tiny)
    kinds = set()
    for rollout in seen:
        assert torch.equal(rollout.prompts.view(4, 4, -1), rollout.prompts.view(4, 4, -1)[:, :1].expand(4, 4, -1))
        for rewards, advantages in zip(rollout.rewards.split(4), rollout.advantages.split(4), strict=True):
            kinds.add(int(rewards.sum()))
            if rewards.min() == rewards.max():
                assert advantages.abs().max() < 1e-6
            else:
                torch.testing.assert_close(advantages, (rewards - rewards.mean()) / rewards.std())
    assert kinds >= {0, 1, 2}


def test_on_policy_ratios_are_one_and_late_ones_are_not(tiny):
    on_policy, late = (walk.train(replace(tiny, updates=1, lag=lag)) for lag in (0, 2))
    assert all(row["ratio_max"] == pytest.approx(1, abs=1e-5) for row in on_policy)
    assert all("ratio_max" not in row for row in late[:2])
    assert all(row["ratio_max"] > 1.001 for row in late[3:])


def test_equal_settings_give_equal_runs_whether_the_start_policy_is_made_or_loaded(tiny):
    first, again, other = (walk.train(run) for run in (tiny, tiny, replace(tiny, seed=1)))
    assert str(first) == str(again)  # compared as text, because NaN != NaN
    assert str(first) != str(other)


@pytest.mark.parametrize("clip", ["ppo", "none", "0.7:1.9"])
def test_clip_names_fixed_bounds_or_gives_them_as_a_pair(clip):
    rule = walk.clip_rule(walk.Run(clip=clip))
    lower, upper = {"ppo": (0.8, 1.2), "none": (1e-9, 1e9)}.get(clip, (0.7, 1.9))
    assert isinstance(rule, FixedBounds) and (rule.lower.item(), rule.upper.item()) == (lower, upper)


def test_contribution_and_target_replace_those_of_the_preset_only_if_given():
    assert walk.clip_rule(walk.Run(clip="paper")).config == ClipConfig.preset("paper")
    given = walk.clip_rule(walk.Run(clip="paper", contribution="gradient", target=0.45)).config
    assert given == replace(ClipConfig.preset("paper"), contribution="gradient", positive_contribution_target=0.45)


COLUMNS = ["rollout", "reward", *study.DETAILS, "greedy", "pass1", "pass16"]


def result(first_rollouts: float, last_rollouts: float) -> study.Columns:
    """Return a cell's result with the same numbers in all columns."""
    return {column: [first_rollouts] * 40 + [last_rollouts] * study.LAST for column in COLUMNS}


def test_the_table_has_mean_standard_error_and_number_of_seeds_of_the_last_rollouts():
    name = "walk-lag8-updates8-lr0.0001"
    cells = study.read_cells(FOLDER / "study.toml", f"{name}-*")
    found = {}
    for seed, value in enumerate((0.5, 0.6, 0.7)):
        found[f"{name}-ppo-seed{seed}"] = result(9, value)
        if seed < 2:  # the difference depends on the seed, so that only pairs of seeds give the right error
            found[f"{name}-gradient-seed{seed}"] = result(9, value + 0.2 + seed / 10)
    lines = study.tables(cells, found, against="", details=False)
    assert "| ppo | 0.600 \u00b1 0.058 (3) |" in lines  # 0.1 / sqrt(3)
    assert "| gradient | 0.800 \u00b1 0.100 (2) |" in lines
    lines = study.tables(cells, found, against="ppo", details=False)
    assert "| gradient | 0.800 \u00b1 0.100 (2) | 0.250 \u00b1 0.050 (2) |" in lines


def test_two_cells_of_a_seed_are_a_pair_only_if_their_start_policies_are_equal():
    name = "lag8-updates8-lr0.0001"
    cells = study.read_cells(FOLDER / "study.toml", f"*{name}-*")
    found = {}
    for task in ("walk", "pipeline"):
        for seed in (0, 1):
            found[f"{task}-{name}-ppo-seed{seed}"] = result(0.25, 0.5)
            found[f"{task}-{name}-gradient-seed{seed}"] = result(0.25 + seed / 100, 0.75 + seed / 10)
    lines = study.tables(cells, found, against="ppo", details=False)
    both = "| gradient | 0.800 \u00b1 0.050 (2) | "
    assert both + "0.250 (1) |" in lines  # the walk: the first rollouts of seed 1 differ
    assert both + "0.300 \u00b1 0.050 (2) |" in lines  # the pipeline: first rollouts always differ


def test_the_figure_has_a_line_per_method_and_a_panel_per_setting_with_several_learning_rates(tmp_path):
    cells = study.read_cells(FOLDER / "study.toml", "walk-*")
    rewards = {"8-lr0.0001-ppo-seed0": 0.5, "8-lr0.0001-ppo-seed1": 0.7, "8-lr5e-05-ppo-seed0": 0.8}
    rewards |= {"8-lr5e-05-gradient-seed0": 0.9, "1-lr0.0001-ppo-seed0": 0.1}
    found = {f"walk-lag8-updates{name}": {column: [value] for column in COLUMNS} for name, value in rewards.items()}
    (panel,) = study.draw(cells, found, ["gradient", "ppo=PPO"], tmp_path / "study.png").axes
    assert [container.get_label() for container in panel.containers] == ["gradient", "PPO"]
    lines = [container.lines for container in panel.containers]
    assert [line.get_xydata().tolist() for line, *_ in lines] == [[[5e-5, 0.9]], [[5e-5, 0.8], [1e-4, 0.6]]]
    (at_5e5, at_1e4) = lines[1][2][0].get_segments()
    assert [end[1] for end in at_1e4] == pytest.approx([0.5, 0.7])  # 0.6 and the error of two seeds
    assert at_5e5[0].tolist() == at_5e5[1].tolist()
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
    for name in reversed(given):
        columns = given[name]
        rows = [columns, *zip(*columns.values(), strict=True)]
        (runs / f"{name}.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
        assert study.add(given, results, runs) == 1
    assert study.add(given, results, runs) == 0
    assert str(study.read_parquet(results)) == str(given)  # compared as text, because NaN != NaN
    assert str(study.read_results(tmp_path / "none.parquet", runs)["walk-seed1"]) == str(given["walk-seed1"])
    assert not list(tmp_path.glob("*.part"))


def screening() -> tuple[dict[str, dict], dict]:
    """Return the cells of the protocol and those that have a result."""
    return study.read_cells(FOLDER / "protocol.toml", "*"), study.read_parquet(FOLDER / "protocol.parquet")


def test_every_mean_with_an_error_that_the_study_reports_comes_from_its_results():
    """Each is a method's reward in one setting or the difference of two methods, over the seeds in brackets or 3."""
    reported_by = set()
    cells = study.read_cells(FOLDER / "study.toml", "*")
    for by_lr in study.summaries(cells, study.read_parquet(FOLDER / "results.parquet")).values():
        of_method = [runs for by_method in by_lr.values() for runs in by_method.values()]
        groups = [[run["reward"] for run in runs.values()] for runs in of_method]
        groups += [study.differences(*pair) for pair in itertools.product(of_method, repeat=2)]
        reported_by |= {study.mean_and_error(group) for group in groups}
    screened, _ = compare.outcomes(*screening(), compare.STAGES["screen"])
    for runs in (runs for by_method in screened.values() for by_lr in by_method.values() for runs in by_lr.values()):
        reported_by.add(study.mean_and_error([outcome.accuracy for outcome in runs.values()]))
    through_pipeline, _ = compare.outcomes(*screening(), compare.STAGES["pipeline"])
    pairs = [*compare.pairs_lines(screened), *compare.pipeline_lines(through_pipeline)]
    reported_by |= {cell for line in pairs if line.startswith("| ") for cell in line.strip("| ").split(" | ")}
    pages = *CONCLUSIONS, FOLDER / "DETAILS.md", REPOSITORY / "README.md"
    text = " ".join(" ".join(page.read_text() for page in pages).split())
    reported = re.findall(r"(-?\d\.\d{3} \u00b1 \d\.\d{3})(?: \((\d+)\))?", text)
    assert len(reported) > 100
    assert {f"{value} ({num or 3})" for value, num in reported} <= reported_by


def test_the_cells_with_fixed_bounds_ran_with_those_that_the_protocol_names():
    cells, found = screening()
    ran = set()
    for name, cell in cells.items():
        if name in found and (bounds := walk.fixed_bounds(cell["flags"]["clip"])):
            for column, bound in zip(("lower", "upper"), bounds, strict=True):
                assert {value for value in found[name][column] if value == value} == {bound}
            ran.add(cell["method"])
    assert {"ppo", "stock_is", "decoupled", "lower_0.5", "upper_1.5", "clip_higher"} <= ran


def test_the_cells_of_a_search_ran_with_the_preset_that_the_protocol_names():
    """The ranges tell `released` from the others, and a target of 0.5 instead of 0.4 tells `readme` from `paper`."""
    cells, found = screening()
    mean_upper: dict[str, dict[str, float]] = {"paper": {}, "readme": {}, "released": {}}
    for name, cell in cells.items():
        if (method := cell["method"]) in mean_upper and name in found:
            config = ClipConfig.preset(cell["flags"]["clip"])
            assert config == ClipConfig.preset(method)
            bounds = [[value for value in found[name][column] if value == value] for column in ("lower", "upper")]
            for values, grid in zip(bounds, (config.lower_grid(), config.upper_grid()), strict=True):
                assert grid[0] <= min(values) and max(values) <= grid[-1] + 1e-9
            mean_upper[method][name.replace(method, "")] = statistics.fmean(bounds[1])
    shared = mean_upper["paper"].keys() & mean_upper["readme"].keys()
    assert len(shared) > 20 and mean_upper["released"]
    assert all(mean_upper["paper"][setting] < mean_upper["readme"][setting] for setting in shared)


def test_every_other_number_of_the_conclusions_stands_on_another_page_of_the_folder():
    number = re.compile(r"(?<![\w.])[-+]?\d\.\d{2,}")
    details = set(FOLDER.glob("*.md")) - set(CONCLUSIONS)
    found = {value.lstrip("+") for path in details for value in number.findall(path.read_text())}
    reported = {value.lstrip("+") for path in CONCLUSIONS for value in number.findall(path.read_text())}
    assert reported <= found


def test_the_sentences_of_the_answer_hold():
    cells, found = screening()
    assert not any(compare.outcome(columns).fell for columns in found.values())
    table, screened, _ = compare.families_that_are_there(cells, found)
    results = compare.tested(table, screened)
    less_ppo = {(t.regime, t.method): t for t in results[compare.PRIMARY] + results[compare.OTHER_REGIMES]}
    only_late = [LATE, f"{LATE} wrong 0.75", "walk lag 4 epochs 4 rollouts 30", "detour lag 8"]
    assert all(t.difference.mean > 0 for t in less_ppo.values() if t.regime in only_late)
    unclear = {key for key, t in less_ppo.items() if t.regime in only_late and t.p >= 0.05}
    assert unclear == {("detour lag 8", "decoupled"), ("walk lag 4 epochs 4 rollouts 30", "decoupled")}
    for name in only_late:
        means = {m: less_ppo[name, m].difference.mean for m in compare.tested_methods(table) if m != "decoupled"}
        assert min(means, key=means.__getitem__) == "paper"
    elsewhere = {key: t for key, t in less_ppo.items() if t.regime not in only_late}
    assert {key for key, t in elsewhere.items() if t.p < 0.05} == {(ONCE, "topr_sequence"), (ONCE, "balanced")}
    assert max(t.difference.high for t in elsewhere.values()) < 0.0235
    assert all(t.difference.mean > 0 for t in less_ppo.values() if t.method == "stock_is")
    verdicts = {t.regime: compare.verdict(t.difference) for t in results[compare.OURS_AGAINST_BEST]}
    assert [name for name, found in verdicts.items() if found == "worse"] == [ONCE, "walk lag 0 epochs 8 rollouts 30"]
    assert Counter(verdicts.values()) == {"worse": 2, "not worse": 3, "undecided": 6}
    for method in compare.tested_methods(table):
        assert compare.best_rates(screened[LATE][method])[0] == 2.5e-5


def test_what_the_page_says_of_the_pipeline_holds():
    cells, found = screening()
    ran, left_out = compare.outcomes(cells, found, compare.STAGES["pipeline"])
    assert not left_out and len(ran) == 2
    means = {
        name: {
            method: compare.mean_accuracy(by_seed)
            for method, by_rate in ran[name].items()
            for by_seed in by_rate.values()
        }
        for name in ran
    }
    late, fresh = means["pipeline lag 8"], means["pipeline lag 0 epochs 4 rollouts 30"]
    *gaining, ppo, stock = sorted(late, key=late.__getitem__, reverse=True)
    assert (gaining[-1], ppo, stock, len(gaining)) == ("paper", "ppo", "stock", 7)
    text = " ".join((REPOSITORY / "docs" / "study.md").read_text().split())
    assert f"no rule is above `ppo` by more than {max(fresh.values()) - fresh['ppo']:.3f}" in text
    for name in found.keys() & {name for name in cells if name.startswith("pipeline")}:
        staleness = found[name]["staleness"]
        assert staleness == ([float(min(n, 8)) for n in range(60)] if "lag8" in name else [0.0] * 30)


def test_every_difference_with_an_interval_is_one_of_the_test():
    """A loss may be written as a positive number."""
    table, screened, _ = compare.families_that_are_there(*screening())
    text = " ".join(" ".join(path.read_text() for path in CONCLUSIONS).split())
    reported = re.findall(r"-?\d\.\d{3} \[-?\d\.\d{3}, -?\d\.\d{3}\]", text)
    found = set()
    for t in itertools.chain(*compare.tested(table, screened).values()):
        d = t.difference
        found |= {f"{m:.3f} [{a:.3f}, {b:.3f}]" for m, a, b in ((d.mean, d.low, d.high), (-d.mean, -d.high, -d.low))}
    of_tapered = re.findall(r"\| (\S+) \| \[(\S+), (\S+)\] \|", (FOLDER / "TAPERED.md").read_text())
    found |= {"{} [{}, {}]".format(*(number.lstrip("+") for number in row)) for row in of_tapered}
    assert len(reported) > 8 and set(reported) <= found


@pytest.mark.parametrize("page", compare.PAGES, ids=lambda page: page.name)
def test_the_pages_of_the_comparison_have_the_tables_that_the_command_writes(page):
    text = page.read_text()
    assert compare.MARKED.search(text)
    assert "Left out" not in text
    assert compare.with_tables(text, *screening()) == text


def test_a_table_is_written_between_its_marks_alone(monkeypatch):
    monkeypatch.setattr(compare, "stage_lines", lambda stage, *_: [f"{stage}, again", ""])
    page = (
        "before\n<!-- compare.py {0} -->\n{1}\n<!-- end -->\nbetween\n<!-- compare.py {2} -->\n\n<!-- end -->\nafter\n"
    )
    written = compare.with_tables(page.format("screen", "old\n\nold", "test", ""), {}, {})
    assert written == page.format("screen", "\nscreen, again\n", "test", "").replace(
        "test -->\n\n<!--", "test -->\n\ntest, again\n\n<!--"
    )
    assert compare.with_tables(written, {}, {}) == written


def test_the_results_are_the_cells_of_the_study():
    cells = study.read_cells(FOLDER / "study.toml", "*")
    assert set(study.read_parquet(FOLDER / "results.parquet")) == set(cells)
    assert len(cells) == 718
    for cell in cells.values():
        settings = {axis: cell[axis] for axis in study.AXES if axis != "method"} | cell["flags"]
        walk.clip_rule(walk.Run(**settings))


def test_flags_of_a_pipeline_cell_give_the_training_command_the_same_settings(tmp_path):
    base = pipeline.flags(pipeline.make_model(tmp_path))

    def settings(*method: str, **given):
        run = walk.Run(**{"task": "pipeline", "seed": 3, "lr": 2e-4, "lag": 8} | given)
        return pipeline.parse([*base, *method, *through_pipeline.flags_of(run)])

    static = settings("--policy_loss", "ppo", clip="0.76:2.36", dual_clip=3.0)
    assert (static.train.seed, static.actor.adam.lr, static.offpolicy.lag, static.actor.dual_clip) == (3, 2e-4, 8, 3)
    assert static.actor.eps_clip_low_high == pytest.approx([0.24, 1.36])
    ppo = settings("--policy_loss", "ppo", clip="ppo", lag=0)
    assert (ppo.offpolicy.lag, ppo.actor.dual_clip) == (0, None)
    assert ppo.actor.eps_clip_low_high == pytest.approx([0.2, 0.2])

    bapo = ("--policy_loss", "bapo", "--bapo.preset", "readme")
    found = settings(*bapo, clip="readme", contribution="gradient", target=0.45, half_life=22.8).bapo
    assert (found.contribution, found.positive_contribution_target, found.smoothing) == ("gradient", 0.45, 22.8)
    found = settings(*bapo, clip="readme").bapo
    assert (found.contribution, found.positive_contribution_target, found.smoothing) == ("surrogate", 0.5, 0)
    assert settings(*bapo, clip="readme", task="pipeline_replay", lag=0).replay.ratio > 0
    assert settings(*bapo, clip="readme", task="pipeline_partial", lag=0).partial.token_budget > 0
    steady = settings("--policy_loss", "bapo", "--bapo.preset", "steady", clip="steady", dual_clip=3.0)
    assert (steady.bapo.smoothing, steady.actor.dual_clip) == (20.0, 3.0)
    assert settings(*bapo, clip="paper", token_weight="rollout_prob").bapo.token_weight == "rollout_prob"
    topr = settings("--policy_loss", "topr", clip="topr:level=sequence")
    assert topr.topr.level == "sequence"
    decoupled = settings(*bapo, clip="paper", base="start", correction="clip")
    assert decoupled.offpolicy.objective == "decoupled"


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"clip": "ppo"}, {"METHOD": "grpo"}),
        ({"clip": "ppo", "base": "start"}, {"METHOD": "stock"}),
        ({"clip": "ppo", "base": "start", "correction": "mask"}, {"METHOD": "stock_is"}),
        ({"clip": "ppo", "base": "start", "correction": "clip"}, {"METHOD": "grpo"}),
        ({"clip": "steady"}, {"METHOD": "bapo", "PRESET": "steady"}),
        ({"clip": "balanced:half_life=20"}, {"METHOD": "balanced"}),
    ],
)
def test_a_pipeline_cell_names_its_method_as_the_scripts_do(given, method):
    assert through_pipeline.method_of(walk.Run(**given))[0] == method


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
    for file, words in commands:
        if not file.endswith("study.py"):
            assert set(re.findall(r"--(\w+)", words)) <= {field.name for field in fields(walk.Run)}
        else:
            run = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True, cwd=REPOSITORY)
            assert set(re.findall(r"--\w+", words)) <= set(re.findall(r"--\w+", run.stdout))


def with_accuracy(*values: float) -> dict[int, compare.Outcome]:
    return {seed: compare.Outcome(value, value, 0.5, 1.0, False, (0.1, 1.0)) for seed, value in enumerate(values)}


def test_the_endpoint_is_the_mean_of_the_last_fifth():
    late = [0.1, 0.2, 0.3, 0.1, 0.2, 0.3]
    columns = {
        "heldout": [nan, 0.6] * 12 + late,
        "reward": [0.25, *[0.9] * 29],
        "entropy": [9.0] * 29 + [0.6],
        "pass16": [nan] * 29 + [0.9],
    }
    found = compare.outcome(columns)
    assert found.accuracy == pytest.approx(0.2) and found.area == pytest.approx((12 * 0.6 + sum(late[1::2])) / 15)
    assert found.fell and not compare.outcome(columns | {"reward": [0.15, *[0.9] * 29]}).fell
    assert found.began == (0.25, 9.0)
    assert found.entropy == pytest.approx((5 * 9.0 + 0.6) / 6) and found.pass16 == 0.9


def test_a_method_that_lacks_a_planned_cell_is_left_out_and_named():
    cell = {"task": "walk", "lag": 8, "regime": {}, "lr": 1e-4}
    methods = {"a": "ppo", "b": "topr", "c": "topr", "d": "m2"}
    seeds = {"a": 200, "b": 200, "c": 201, "d": 210}
    cells = {name: cell | {"method": method, "seed": seeds[name]} for name, method in methods.items()}
    columns = {"heldout": [0.5] * 15, "reward": [0.3] * 15, "entropy": [1.0] * 15, "pass16": [0.9] * 15}
    table, left_out = compare.outcomes(cells, {"a": columns, "b": columns, "d": columns}, range(200, 205))
    assert {name: [*by_method] for name, by_method in table.items()} == {"walk lag 8": ["ppo"]}
    assert left_out == {"walk lag 8": ["Left out: topr in walk lag 8, which lacks 1 of 2 cells."]}


def test_differences_are_paired_by_seed_with_the_t_distributions_interval():
    ours, theirs = with_accuracy(0.6, 0.8, 0.7, 0.9), with_accuracy(0.5, 0.6, 0.6, 0.7)
    found = compare.difference(ours, theirs)
    # mean 0.15, standard error 0.02887, t of 3 degrees of freedom at 0.975: 3.18245
    assert found.mean == pytest.approx(0.15)
    assert (found.low, found.high) == pytest.approx((0.15 - 3.18245 * 0.0288675, 0.15 + 3.18245 * 0.0288675), abs=1e-5)
    assert found.p == pytest.approx(0.01385, abs=1e-4)


def test_methods_with_other_seeds_or_start_policies_are_not_compared():
    ours, theirs = with_accuracy(0.6, 0.8), with_accuracy(0.5, 0.6)
    for other in (theirs | {1: replace(theirs[1], began=(0.2, 1.0))}, {0: theirs[0]}):
        with pytest.raises(ValueError, match="different seeds, or a seed has two start policies"):
            compare.difference(ours, other)


def test_holm_multiplies_by_the_comparisons_that_are_left_and_never_decreases():
    assert compare.holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert compare.holm([0.5, 0.9]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="not a number"):
        compare.holm([0.04, nan])


def test_the_leaders_are_the_best_of_each_kind_beside_the_rules_that_are_always_tested():
    ranked = [
        (m, 0.0) for m in ("topr", "ppo", "topr_sequence", "balanced_steady", "m2", "balanced", "readme", "steady")
    ]
    assert compare.leaders(ranked)[3:] == ["topr", "balanced_steady", "m2", "readme"]
    ranked = [(m, 0.0) for m in ("topr", "m2", "readme", "cispo", "dis", "balanced", "steady")]
    assert compare.leaders(ranked)[3:] == ["topr", "m2", "readme", "cispo", "balanced"]  # one of ours is among them


def test_a_rule_that_is_another_one_in_the_papers_regime_takes_its_figures_there():
    late, paper = "walk lag 8", "walk lag 0 epochs 4 rollouts 30"
    table = {
        late: {"ppo": {1e-4: with_accuracy(0.5)}, "stock": {1e-4: with_accuracy(0.3), 5e-5: with_accuracy(0.4)}},
        paper: {"ppo": {1e-4: with_accuracy(0.7)}, "topr": {1e-4: with_accuracy(0.9)}},
    }
    assert compare.ranking(table) == [("ppo", pytest.approx(0.6)), ("stock", pytest.approx(0.55))]


LATE, PAPER, MIXED = "walk lag 8", "walk lag 0 epochs 4 rollouts 30", "walk lag 4 mixed True"
ONCE = "walk lag 0 epochs 1"


@pytest.fixture
def two_stages():
    """Return the outcomes of stage 2 in three regimes, and those of stage 1 in two of them."""
    ppo = {1e-4: with_accuracy(0.5, 0.5, 0.5, 0.5)}
    clear = {1e-4: with_accuracy(0.61, 0.59, 0.62, 0.58)}
    clearer = {1e-4: with_accuracy(0.60, 0.61, 0.59, 0.62)}
    unclear = {1e-4: with_accuracy(0.52, 0.51, 0.53, 0.54)}  # p is 0.03, and 0.06 after Holm
    by_method = {"ppo": ppo, "paper": unclear, "balanced": clear}
    screened = {name: by_method | {"cispo": {1e-4: with_accuracy(0.9, 0.9)}} for name in (PAPER, LATE)}
    return {PAPER: by_method, LATE: by_method, MIXED: by_method | {"paper": clearer}}, screened


def test_every_family_of_comparisons_is_corrected_for_its_own_number(two_stages):
    table, screened = two_stages
    found = compare.families(table, screened)
    methods = [("paper", "ppo"), ("balanced", "ppo")]
    assert found[compare.PRIMARY] == [(name, *pair) for name in (PAPER, LATE) for pair in methods]
    assert found[compare.OTHER_REGIMES] == [(MIXED, *pair) for pair in methods]
    of_ours = [(name, "balanced", "paper") for name in (PAPER, LATE, MIXED)]  # stage 2 does not test cispo
    assert found[compare.OURS_AGAINST_BEST] == of_ours
    p_values = {title: [t.p for t in results] for title, results in compare.tested(table, screened).items()}
    uncorrected = [compare.difference(table[LATE][m][1e-4], table[LATE]["ppo"][1e-4]).p for m in ("paper", "balanced")]
    assert p_values[compare.PRIMARY] == pytest.approx([min(1, 2 * uncorrected[0]), 4 * uncorrected[1]] * 2)
    del table[LATE]["balanced"][1e-4][1]
    with pytest.raises(ValueError, match="different seeds"):
        compare.difference_lines(table, screened)


def test_in_a_regime_of_stage_1_each_method_has_its_own_best_rate_and_elsewhere_all_have_one():
    rates = {5e-5: with_accuracy(0.5), 1e-4: with_accuracy(0.6)}
    lower = {5e-5: with_accuracy(0.6), 1e-4: with_accuracy(0.5)}
    screened = {LATE: {"ppo": rates, "m2": lower}}
    table = {MIXED: {"ppo": {5e-5: with_accuracy(0.5)}, "m2": {5e-5: with_accuracy(0.5)}}}
    assert [compare.rate(table, screened, LATE, method) for method in ("ppo", "m2")] == [1e-4, 5e-5]
    assert compare.rate(table, screened, MIXED, "ppo") == 5e-5
    worse = {5e-5: with_accuracy(0.55), 1e-4: with_accuracy(0.54)}
    assert compare.best_other(screened | {LATE: {"m2": lower, "paper": worse}}, MIXED, {"m2", "paper"}) == "m2"
    table[MIXED]["m2"] = {1e-4: with_accuracy(0.5)}
    with pytest.raises(ValueError, match="unpack"):
        compare.rate(table, screened, MIXED, "ppo")


def test_our_rule_is_worse_not_worse_or_undecided_by_its_interval():
    ends = {"worse": (-0.03, -0.001), "not worse": (-0.009, 0.02), "undecided": (-0.011, 0.02)}
    for name, (low, high) in ends.items():
        assert compare.verdict(compare.Difference(0.0, low, high, 0.5)) == name


def test_two_methods_that_are_equal_do_not_differ():
    same = with_accuracy(0.5, 0.6)
    assert compare.difference(same, same) == compare.Difference(0.0, 0.0, 0.0, 1.0)


def test_the_overview_has_ppos_accuracy_and_a_star_at_each_difference_that_is_significant_after_correction(two_stages):
    table, screened = two_stages
    table[LATE] = table[LATE] | {"stock_is": table[LATE]["balanced"]}
    table[MIXED] = table[MIXED] | {"stock_is": table[MIXED]["balanced"]}
    screened[LATE] = screened[LATE] | {"stock_is": table[LATE]["balanced"]}
    assert compare.overview_lines(table, screened) == [
        "| data | `ppo` | `paper` | `balanced` | `stock_is` |",
        "| --- | --- | --- | --- | --- |",
        "| 4 epochs | 0.500 | +0.025 | +0.100* | as `ppo` |",
        "| late by 8 | 0.500 | +0.025 | +0.100* | +0.100* |",
        "| 0 to 4 late | 0.500 | +0.105* | +0.100* | +0.100* |",
        "",
    ]


def test_a_family_is_not_tested_before_all_its_cells_are_there(two_stages, monkeypatch, capsys):
    table, screened = two_stages
    monkeypatch.setattr(sys, "argv", ["compare.py", "test"])

    def stages(found, left_out):
        monkeypatch.setattr(
            compare, "outcomes", lambda cells, _, seeds: (found, left_out) if 210 in seeds else (screened, {})
        )

    for missing in (LATE, PAPER):
        stages(table, {missing: ["Left out: m2"]})
        with pytest.raises(SystemExit, match=r"No test before every planned cell of the primary .*\nLeft out: m2"):
            compare.main()
    stages({}, {})
    with pytest.raises(SystemExit, match="No test before"):
        compare.main()
    stages(table, {MIXED: ["Left out: m2"]})
    compare.main()
    alone = capsys.readouterr()
    assert (
        compare.PRIMARY in alone.out and compare.OURS_AGAINST_BEST not in alone.out and "0 to 4 late" not in alone.out
    )
    assert "primary family alone" in alone.err
    stages(table | {"walk lag 0 replay 8": table[MIXED]}, {MIXED: ["Left out: m2"]})
    compare.main()
    tested, described = capsys.readouterr().out.split("Means by method:")
    assert "replay" not in tested and "replay" in described and "0 to 4 late" not in described
    stages(table, {})
    compare.main()
    whole = capsys.readouterr().out
    assert compare.OTHER_REGIMES in whole and compare.OURS_AGAINST_BEST in whole and "0 to 4 late" in whole


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("walk lag 4 epochs 4 rollouts 30", "late by 4, 4 epochs"),
        ("walk lag 8 wrong 0.75", "late by 8, more wrong"),
        ("walk lag 0 replay 8", "replay"),
        ("detour lag 0 epochs 4 rollouts 30", "detour, 4 epochs"),
        ("walk lag 0 epochs 1 rollouts 60", "1 epoch"),
    ],
)
def test_a_regime_has_a_readable_label(name, label):
    assert compare.label(name) == label


def test_a_regimes_name_does_not_depend_on_the_order_of_its_settings():
    cell = {"task": "walk", "lag": 0}
    assert {
        compare.regime(cell | {"regime": dict(pairs)})
        for pairs in itertools.permutations([("epochs", 4), ("rollouts", 30)])
    } == {PAPER}


def test_the_predicted_change_of_entropy_is_compared_with_that_to_the_next_rollout():
    changes = [0.3, -0.2, 0.1, 0.4, -0.5, 0.2, 0.1, -0.3, 0.2, 0.3, 0.1]
    entropy = [1.0, 1.0, *(1.0 + sum(changes[: n + 1]) for n in range(len(changes)))]
    columns = {"entropy": entropy, "entropy/predicted_change": [nan, *(2 * change for change in changes), 0.0]}
    pairs = compare.predicted_and_measured(columns, 5)
    assert pairs == [pytest.approx((0.2, 0.1)), pytest.approx((1.0, 0.5))]
    assert compare.entropy_correlation(columns, columns, 1) == pytest.approx(1)
    falling = columns | {"entropy": [-value for value in entropy]}
    assert compare.entropy_correlation(columns, falling, 1) == pytest.approx(-1)
    columns |= {f"entropy/{part}": [nan, *[0.25] * 12] for part in compare.PARTS} | {"reward": [0.1]}
    cell = {"task": "walk", "lag": 8, "regime": {}, "method": "ppo", "seed": 200, "lr": 1e-4}
    cells = {"a": cell, "b": cell, "unfinished": cell, "pipeline": cell | {"method": "paper"}}
    lines = compare.entropy_lines(cells, {"a": columns, "b": columns, "pipeline": {"entropy": entropy}})
    assert lines[0] == "screen, late by 8" and len(lines) == 6
    assert (
        lines[4].startswith("| ppo | 1.000 \u00b1 0.000 (2) | 1.000 \u00b1 0.000 (2) | 1.000 |")
        and "| +0.0583 | +0.1167 | +0.2500 |" in lines[4]
    )


def test_the_control_of_the_prediction_is_the_measured_entropy_of_other_seeds_at_the_same_rate():
    changes = [0.3, -0.2, 0.1, 0.4, -0.5, 0.2, 0.1, -0.3, 0.2, 0.3, 0.1]
    cells, found = {}, {}
    for seed, sign, lr in ((200, 1, 1e-4), (201, -1, 1e-4), (202, 1, 5e-5)):
        name = f"walk-{seed}"
        cells[name] = {"task": "walk", "lag": 8, "regime": {}, "method": "ppo", "seed": seed, "lr": lr}
        found[name] = {"entropy": [1 + sign * sum(changes[:n]) for n in range(len(changes) + 1)], "reward": [0.1]}
        found[name] |= {f"entropy/{part}": [0.25] * 12 for part in compare.PARTS}
        found[name] |= {"entropy/predicted_change": [*(sign * change for change in changes), nan]}
    row = compare.entropy_lines(cells, found)[4]
    assert "| 1.000 \u00b1 0.000 (3) | -1.000 |" in row


def test_over_methods_mean_predicted_and_measured_changes_of_entropy_correlate():
    cells, found = {}, {}
    for method, change in {"ppo": 0.1, "m2": 0.2, "paper": 0.4, "cispo": 9.0}.items():
        for seed in (200, 201)[: 1 if method == "cispo" else 2]:
            name = f"{method}{seed}"
            cells[name] = {"task": "walk", "lag": 8, "regime": {}, "method": method, "seed": seed, "lr": 1e-4}
            noise = [0.3, -0.2, 0.1, 0.4, -0.5, 0.2, 0.1, -0.3, 0.2, -0.3]
            entropy = [1 + change * n + sum(noise[:n]) for n in range(11)]
            predicted = [(2 if method == "m2" else 1) * change + value for value in noise]
            found[name] = {"entropy": entropy, "entropy/predicted_change": [*predicted, nan], "reward": [0.1]}
            found[name] |= {f"entropy/{part}": [0.25] * 11 for part in compare.PARTS}
    expected = statistics.correlation([0.1, 0.2, 0.4], [0.1, 0.4, 0.4])
    line = f"Over 3 methods the mean measured and predicted changes correlate at {expected:.2f}."
    assert compare.entropy_lines(cells, found)[-2] == line


def test_mean_bounds_and_eq_8s_share_are_means_over_the_updates_of_a_regime_method_and_rate():
    cell = {"task": "walk", "lag": 8, "regime": {}, "method": "paper", "seed": 205, "lr": 1e-4}
    columns = {"lower": [nan, 0.6, 0.7], "upper": [nan, 1.2, 1.4], "share_unclipped": [0.4] * 3, "share": [0.5] * 3}
    columns |= {"eq8_positive": [nan, 0.2, 0.4], "eq8_negative": [nan, 0.4, 0.4]}
    cells = {"a": cell, "b": cell | {"lr": 1e-5}, "tested": cell | {"seed": 210}, "unfinished": cell}
    *_, row, _, _ = compare.bounds_lines(cells, {"a": columns, "b": columns, "tested": {"lower": [0.9]}})
    assert row == "| late by 8 | paper | 0.0001 | 0.650 | 1.300 | 0.400 | 0.500 | 0.429 | 3.000 | 1 |"


def test_pairs_are_differences_from_ppo_at_the_same_rate_of_the_methods_with_the_same_seeds():
    table = {
        LATE: {
            "ppo": {1e-4: with_accuracy(0.5, 0.7), 5e-5: with_accuracy(0.6, 0.6)},
            "paper": {1e-4: with_accuracy(0.6, 0.7), 5e-5: with_accuracy(0.8, 0.7)},
            "dis": {1e-4: with_accuracy(0.6), 5e-5: with_accuracy(0.8)},
        }
    }
    title, _, head, _, *rows, _ = compare.pairs_lines(table)
    assert title == "late by 8: less ppo at the same rate, mean \u00b1 standard error (seeds)"
    assert head == "| method | accuracy, 5e-05 | entropy, 5e-05 | accuracy, 0.0001 | entropy, 0.0001 |"
    same = "0.000 \u00b1 0.000 (2)"
    assert compare.pairs_lines({LATE: {"paper": table[LATE]["paper"]}}) == []  # ppo lacks a cell
    assert rows == [f"| paper | 0.150 \u00b1 0.050 (2) | {same} | 0.050 \u00b1 0.050 (2) | {same} |"]


def test_through_the_pipeline_every_rule_is_described_by_its_mean_and_its_difference_from_ppo():
    table = {
        "pipeline lag 8": {
            "ppo": {1e-4: with_accuracy(0.5, 0.7)},
            "paper": {1e-4: with_accuracy(0.6, 0.7)},
            "balanced": {5e-5: with_accuracy(0.9, 0.9)},
        }
    }
    assert [line for line in compare.pipeline_lines(table) if line] == [
        "pipeline, late by 8: mean \u00b1 standard error (seeds)",
        "| method | rate | held-out accuracy | less ppo, by seed | entropy |",
        "| --- | --- | --- | --- | --- |",
        "| balanced | 5e-05 | 0.900 \u00b1 0.000 (2) | 0.300 \u00b1 0.100 (2) | 0.500 |",
        "| paper | 0.0001 | 0.650 \u00b1 0.050 (2) | 0.050 \u00b1 0.050 (2) | 0.500 |",
        "| ppo | 0.0001 | 0.600 \u00b1 0.100 (2) | 0.000 \u00b1 0.000 (2) | 0.500 |",
    ]
    del table["pipeline lag 8"]["ppo"]
    assert compare.pipeline_lines(table) == []


def test_the_picture_has_a_panel_per_regime_with_each_methods_interval(tmp_path, two_stages):
    table, screened = two_stages
    figure = compare.draw(table, screened, tmp_path / "study.png")
    first, late, mixed = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == ["paper", "balanced"]
    for panel, name, markers in ((late, LATE, "|o"), (mixed, MIXED, "oo")):
        assert [line.get_marker() for line in panel.lines[1::2]] == list(markers)
        for row, method in enumerate(("paper", "balanced")):
            d = compare.difference(table[name][method][1e-4], table[name]["ppo"][1e-4])
            interval, dot = panel.lines[2 * row : 2 * row + 2]
            assert (*interval.get_xdata(), *interval.get_ydata()) == (d.low, d.high, row, row)
            assert (*dot.get_xdata(), *dot.get_ydata()) == (d.mean, row)
    assert (tmp_path / "study.png").stat().st_size > 0


START = """
import sys
import torch
import walk

torch.set_num_threads(1)
policy = walk.start_policy(walk.Run(seed=3, starts=sys.argv[1]), walk.Walk(10, 8, 0.35, 15))
torch.save(policy.state_dict(), sys.argv[2])
"""


def test_the_cells_of_a_protocol_run_seed_by_seed_over_all_its_blocks():
    cells = study.read_cells(FOLDER / "protocol.toml", "*")
    ordered = study.seed_by_seed(cells)
    assert [cells[name]["seed"] for name in ordered] == sorted(cell["seed"] for cell in cells.values())
    assert {cells[name]["lag"] for name in ordered if cells[name]["seed"] == 200} == {0, 8}


def test_other_kinds_of_processors_make_the_same_start_policy(tmp_path):
    made = []
    for kind in ("default", "avx2"):
        command = [sys.executable, "-c", START, str(tmp_path / kind), str(tmp_path / f"{kind}.pt")]
        path = os.pathsep.join([str(FOLDER), str(REPOSITORY)])
        subprocess.run(command, env=os.environ | {"ATEN_CPU_CAPABILITY": kind, "PYTHONPATH": path}, check=True)
        made.append(torch.load(tmp_path / f"{kind}.pt"))
    one, other = made
    for name, values in one.items():
        torch.testing.assert_close(values, other[name], rtol=0, atol=1e-6)
