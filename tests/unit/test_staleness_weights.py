"""Ratio, weight and clip: every combination of them, and tapered weights with s = pi_start / pi_behavior."""

import itertools
import math

import pytest
import torch

from openrlhf_bapo import BapoPolicyLoss, ClipConfig, FixedBounds, find_clip_bounds
from openrlhf_bapo.rules.clip_rules import make_clip_rule
from openrlhf_bapo.rules.other_rules import RULES
from openrlhf_bapo.rules.staleness_weights import LEVELS, tapered_weights

RULES_WITH_A_CLIP = {
    "ppo": lambda: FixedBounds(0.8, 1.2),
    "m2": RULES["m2"],
    "divergence": RULES["divergence"],
    **{name: lambda name=name: make_clip_rule(ClipConfig.preset(name)) for name in ("paper", "released", "steady")},
}


def stale_micro_batch(seed: int, dtype=torch.float64, batch=6, actions=9) -> dict[str, torch.Tensor]:
    """A random micro-batch whose start and behavior policies differ much, with uneven lengths."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(batch, actions, generator=generator, dtype=dtype)

    rollout = -torch.rand(batch, actions, generator=generator, dtype=dtype) * 3
    start = rollout + noise(0.4)
    lengths = torch.randint(1, actions + 1, (batch, 1), generator=generator)
    return {
        "log_probs": (start + noise(0.3)).requires_grad_(),
        "old_log_probs": start,
        "advantages": torch.randn(batch, 1, generator=generator, dtype=dtype).expand(batch, actions).contiguous(),
        "action_mask": torch.arange(actions).expand(batch, actions) < lengths,
        "rollout_log_probs": rollout,
    }


def plain_weights(batch: dict[str, torch.Tensor], level: str) -> list[list[float]]:
    """The weight of each token by a plain loop; of padding too, where it does not matter."""
    table, names = [], ("old_log_probs", "rollout_log_probs", "advantages", "action_mask")
    for start, rollout, advantages, mask in zip(*(batch[name].tolist() for name in names), strict=True):
        tokens = [math.exp(a - b) for a, b in zip(start, rollout, strict=True)]
        response = math.prod(s for s, is_token in zip(tokens, mask, strict=True) if is_token)
        chosen = [response] * len(tokens) if level == "sequence" else tokens
        table.append([1.0 if a > 0 else min(s, 1.0) for s, a in zip(chosen, advantages, strict=True)])
    return table


WEIGHTS = {
    # The ratio is against the behavior policy, or against the start; with what weight, at which level.
    "behavior": {},
    "start": {},
    "start, capped": dict(is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.0, 1.1)),
    "start, masked by token": dict(is_correction_level="token", is_correction_threshold=(0.8, 1.3)),
    "start, masked by sequence": dict(is_correction_level="seq", is_correction_threshold=(0.9, 1.1)),
    **{f"start, tapered by {level}": dict(tapered=level) for level in LEVELS},
}
WEIGHT_RULES = {"topr": RULES["topr"], "balanced": lambda: RULES["balanced"](target=0.8)}
COMBINATIONS = [
    *((rule, weight) for rule in RULES_WITH_A_CLIP for weight in WEIGHTS),
    *((rule, "behavior") for rule in WEIGHT_RULES),  # others are refused
]


def plain_staleness_weight(weight: str, s: list[float], advantage: float, t: int) -> float:
    """The weight of token t of a response whose tokens have these s, by the formulas of docs/off_policy.md."""
    if "capped" in weight:
        return min(s[t], 1.1)
    if "masked by token" in weight:
        return s[t] if 0.8 <= s[t] <= 1.3 else 0.0
    if "masked by sequence" in weight:
        return s[t] if 0.9 <= math.prod(s) ** (1 / len(s)) <= 1.1 else 0.0
    if "tapered" in weight:
        return 1.0 if advantage > 0 else min(math.prod(s) if "sequence" in weight else s[t], 1.0)
    return 1.0


def plain_loss(batch: dict, loss: BapoPolicyLoss, weight: str, bounds: list) -> tuple[float, torch.Tensor]:
    """The loss and its gradient by a plain loop, between bounds [rows, tokens] or with the weights of a rule."""
    log_probs, base, rollout, advantages, mask = (
        batch[name].tolist()
        for name in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "action_mask")
    )
    lower, upper = bounds
    lengths, value, gradient = [sum(row) for row in mask], 0.0, torch.zeros_like(batch["log_probs"])
    for i, length in enumerate(lengths):
        size = sum(lengths) if loss.token_level_loss else length * len(lengths)
        s = [math.exp(base[i][t] - rollout[i][t]) for t in range(length)]
        of_response = math.exp(sum(log_probs[i][:length]) - sum(base[i][:length]))
        for t in range(length):
            ratio, advantage = math.exp(log_probs[i][t] - base[i][t]), advantages[i][t]
            scale = -plain_staleness_weight(weight, s, advantage, t) / size
            if loss.rule.has_weights:
                w = 1.0 if advantage > 0 else min(of_response if loss.rule.level == "sequence" else ratio, 1.0)
                w *= 1.0 if advantage > 0 else float(getattr(loss.rule, "negative_weight", 1.0))
                gradient[i, t] = scale * w * advantage
                value += scale * w * advantage  # at ratio 1 by value
                continue
            terms = {"unclipped": ratio * advantage}
            terms["clipped"] = min(max(ratio, lower[i][t]), upper[i][t]) * advantage
            kind = min(terms, key=terms.__getitem__)
            if advantage < 0 and loss.dual_clip and terms[kind] < loss.dual_clip * advantage:
                kind, terms["dual"] = "dual", loss.dual_clip * advantage
            value += scale * terms[kind]
            if kind == "unclipped":
                gradient[i, t] = scale * ratio * advantage
    return value, gradient


def trained(batch: dict, loss: BapoPolicyLoss, size: int) -> tuple[float, torch.Tensor, list]:
    """One update in micro-batches of `size` responses: its loss, gradient, and bounds of all tokens."""
    log_probs = batch["log_probs"].detach().requires_grad_()
    batch = batch | {"log_probs": log_probs}
    parts = [{name: x[i : i + size] for name, x in batch.items()} for i in range(0, len(log_probs), size)]
    if loss.rule.needs_tally_first:
        for part in parts:
            loss.tally(**{name.replace("old_", "behavior_"): x.detach() for name, x in part.items()})
        loss.close_update()
    value, bounds = 0.0, []
    for part in parts:
        # The number of tokens and responses of the update, as OpenRLHF gives it to each micro-batch.
        totals = dict(batch_num_tokens=float(batch["action_mask"].sum()), global_batch_size=len(log_probs))
        value = value + loss(**part, **totals)[0]
        pair = (torch.as_tensor(bound).double() for bound in (1 - loss.clip_eps_low, 1 + loss.clip_eps_high))
        bounds.append(torch.stack([bound.expand(part["log_probs"].shape) for bound in pair]))
    value.backward()
    return float(value.detach()), log_probs.grad, torch.cat(bounds, 1).tolist()


@pytest.mark.parametrize(("rule", "weight"), COMBINATIONS, ids=str)
def test_loss_and_gradient_are_those_of_a_plain_loop_however_the_update_is_split(rule, weight):
    make = (RULES_WITH_A_CLIP | WEIGHT_RULES)[rule]
    for seed, token_level_loss, dual_clip in itertools.product((0, 1), (True, False), (None, 3.0)):
        batch = stale_micro_batch(seed)
        if weight == "behavior":
            batch["old_log_probs"] = batch["rollout_log_probs"]
        kwargs = dict(WEIGHTS[weight], token_level_loss=token_level_loss, dual_clip=dual_clip)
        found = []
        for size in (6, 2, 1):
            loss = BapoPolicyLoss(rule=make(), **kwargs)
            value, gradient, bounds = trained(batch, loss, size)
            expected, by_token = plain_loss(batch, loss, weight, bounds)
            assert value == pytest.approx(expected, rel=1e-12, abs=1e-14)
            torch.testing.assert_close(gradient, by_token, rtol=1e-12, atol=1e-15)
            found.append((torch.tensor(value), gradient, torch.tensor(bounds)))
        for split in found[1:]:
            torch.testing.assert_close(split, found[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("level", LEVELS)
def test_the_search_counts_tokens_with_their_tapered_weight(level):
    for seed in range(5):
        batch = stale_micro_batch(seed)
        loss = BapoPolicyLoss(clip_config=ClipConfig(), tapered=level)
        loss(**batch)
        ratio = (batch["log_probs"] - batch["old_log_probs"]).detach().exp()
        weights = torch.tensor(plain_weights(batch, level), dtype=torch.float64) * batch["action_mask"]
        expected = find_clip_bounds(ratio, batch["advantages"], weights, ClipConfig())
        (found,) = (update.found for update in loss.updates)
        assert float(found.lower) == float(expected.lower) and float(found.upper) == float(expected.upper)
        assert float(found.positive_share) == pytest.approx(float(expected.positive_share), rel=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule", RULES_WITH_A_CLIP)
def test_on_fresh_data_nothing_changes_by_a_bit(rule, level):
    results = []
    for tapered in (None, level):
        batch = stale_micro_batch(2, torch.float32)
        batch["rollout_log_probs"] = batch["old_log_probs"]
        loss = BapoPolicyLoss(rule=RULES_WITH_A_CLIP[rule](), tapered=tapered)
        value = loss(**batch)[0]
        value.backward()
        loss.close_update()
        results.append((value.detach(), batch["log_probs"].grad, loss.rule.lower, loss.rule.upper))
    for plain, tapered in zip(*results, strict=True):
        assert torch.equal(plain, tapered)


def test_padding_does_not_count_in_the_responses_weight():
    log_s, mask = torch.tensor([[-0.5, -0.25, math.nan]]), torch.tensor([[1, 1, 0]])
    weights = tapered_weights(log_s, torch.full((1, 3), -1.0), mask, "sequence")
    torch.testing.assert_close(weights, torch.full((1, 3), math.exp(-0.75)))


def test_the_logged_weight_is_the_mean_over_tokens_of_negative_advantage():
    loss = BapoPolicyLoss(rule=FixedBounds(0.8, 1.2), tapered="token")
    start, advantages, mask = torch.zeros(1, 5), torch.tensor([[-1.0, -2.0, 0.0, 1.0, -1.0]]), torch.ones(1, 5)
    mask[0, 4] = 0
    loss(start, start, advantages, mask, torch.tensor([[0.5, 1.0, 2.0, 3.0, 4.0]]))
    loss.close_update()
    expected = (math.exp(-0.5) + math.exp(-1.0)) / 2
    assert loss.take_metrics()["offpolicy/weight_negative"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(tapered="response"), "tapered 'response' is not allowed"),
        (dict(tapered="token", is_correction_level="token"), "not allowed with IS correction"),
        (dict(tapered="token", rule=RULES["topr"]()), "or with a rule that gives weights"),
    ],
)
def test_a_wrong_level_and_a_second_weight_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BapoPolicyLoss(**arguments)
