"""Tapered weights beside a clip: 1 for positive tokens, min(s, 1) for negative ones, s = pi_start / pi_behavior."""

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


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("token_level_loss", [True, False])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rule", RULES_WITH_A_CLIP)
def test_loss_and_gradient_are_those_of_a_plain_loop(rule, level, token_level_loss, dual_clip):
    for seed in range(3):
        batch = stale_micro_batch(seed)
        loss = BapoPolicyLoss(
            rule=RULES_WITH_A_CLIP[rule](), tapered=level, token_level_loss=token_level_loss, dual_clip=dual_clip
        )
        value = loss(**batch)[0]
        value.backward()

        lower, upper = (torch.as_tensor(bound) for bound in (1 - loss.clip_eps_low, 1 + loss.clip_eps_high))
        lower, upper = (bound.double().expand(batch["log_probs"].shape).tolist() for bound in (lower, upper))
        weights, rows = plain_weights(batch, level), range(len(lower))
        log_probs, start, advantages, mask = (
            batch[name].tolist() for name in ("log_probs", "old_log_probs", "advantages", "action_mask")
        )
        lengths = [sum(row) for row in mask]
        expected, gradient = 0.0, torch.zeros_like(batch["log_probs"])
        for i in rows:
            size = sum(lengths) if token_level_loss else lengths[i] * len(lengths)
            for t in range(lengths[i]):
                ratio, advantage = math.exp(log_probs[i][t] - start[i][t]), advantages[i][t]
                terms = {"unclipped": ratio * advantage}
                terms["clipped"] = min(max(ratio, lower[i][t]), upper[i][t]) * advantage
                kind = min(terms, key=terms.__getitem__)
                if advantage < 0 and dual_clip and terms[kind] < dual_clip * advantage:
                    kind, terms["dual"] = "dual", dual_clip * advantage
                expected -= weights[i][t] * terms[kind] / size
                if kind == "unclipped":
                    gradient[i, t] = -weights[i][t] * ratio * advantage / size
        assert float(value.detach()) == pytest.approx(expected, rel=1e-12)
        torch.testing.assert_close(batch["log_probs"].grad, gradient, rtol=1e-12, atol=1e-15)


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


@pytest.mark.parametrize("rule", ["paper", "m2"])
def test_an_update_split_over_micro_batches_has_the_bounds_of_the_whole(rule):
    batch = stale_micro_batch(1)
    found = []
    for size in (6, 2, 1):
        loss = BapoPolicyLoss(rule=RULES_WITH_A_CLIP[rule](), tapered="sequence")
        for start in range(0, 6, size):
            part = {name: values[start : start + size].detach() for name, values in batch.items()}
            loss.tally(
                part["log_probs"], part["old_log_probs"], part["advantages"], part["action_mask"],
                part["rollout_log_probs"],
            )  # fmt: skip
        loss.close_update()
        found.append((float(loss.rule.lower), float(loss.rule.upper)))
    assert found[0] == pytest.approx(found[1], rel=1e-12) and found[0] == pytest.approx(found[2], rel=1e-12)


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
