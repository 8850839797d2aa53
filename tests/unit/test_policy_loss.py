"""BapoPolicyLoss: OpenRLHF's loss where the bounds are fixed, the right gradient where they are found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_bapo import BapoPolicyLoss, ClipBounds, ClipConfig, find_clip_bounds
from openrlhf_bapo.rules.other_rules import TaperedWeights
from openrlhf_bapo.rules.staleness_weights import tapered_weights

ZERO_WIDTH = ClipConfig(ratio_lower_start=0.8, ratio_lower_max=0.8, ratio_upper_start=1.28, ratio_upper_max=1.28)


def found_by(loss: BapoPolicyLoss) -> list[ClipBounds]:
    return [update.found for update in loss.updates]


def micro_batch(seed: int, dtype=torch.float32, batch=5, actions=11) -> dict[str, torch.Tensor]:
    """A random micro-batch with uneven lengths, stale enough that both bounds clip."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(batch, actions, generator=generator, dtype=dtype) * 3
    lengths = torch.randint(1, actions + 1, (batch, 1), generator=generator)
    return {
        "log_probs": (old + torch.randn(batch, actions, generator=generator, dtype=dtype) * 0.7).requires_grad_(),
        "old_log_probs": old,
        "advantages": torch.randn(batch, 1, generator=generator, dtype=dtype).expand(batch, actions).contiguous(),
        "action_mask": torch.arange(actions).expand(batch, actions) < lengths,
        "rollout_log_probs": old + torch.randn(batch, actions, generator=generator, dtype=dtype) * 0.1,
    }


def upstream_loss(**kwargs):
    from openrlhf.models import PolicyLoss

    return PolicyLoss(clip_eps_low=1 - 0.8, clip_eps_high=1.28 - 1, **kwargs)


@given(
    st.integers(0, 10_000),
    st.fixed_dictionaries(
        {
            "dual_clip": st.sampled_from([None, 3.0]),
            "token_level_loss": st.booleans(),
            "is_correction_level": st.sampled_from(["off", "token", "seq"]),
        }
    ),
    st.sampled_from([{}, {"dp_size": 2, "batch_num_tokens": 31.0, "global_batch_size": 7.0}]),
)
def test_equals_openrlhfs_loss_bit_for_bit_when_the_ranges_have_zero_width(seed, arguments, loss_batch_info):
    results, gradients = [], []
    upstream = upstream_loss(**arguments)
    for loss in (upstream, BapoPolicyLoss.from_policy_loss(upstream, clip_config=ZERO_WIDTH)):
        batch = micro_batch(seed)
        result = loss(**batch, **loss_batch_info)
        result[0].backward()
        results.append(result)
        gradients.append(batch["log_probs"].grad)
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert torch.equal(*gradients)


@given(st.integers(0, 10_000), st.sampled_from(["surrogate", "gradient"]), st.sampled_from([None, 3.0]))
@settings(max_examples=30)
def test_gradient_agrees_with_finite_differences_in_float64(seed, contribution, dual_clip):
    batch = micro_batch(seed, torch.float64)
    batch.pop("rollout_log_probs")
    loss = BapoPolicyLoss(clip_config=ClipConfig(contribution=contribution), dual_clip=dual_clip)
    # The bounds are constants of the update; a step of the search must not enter the difference.
    loss.tally(**{name.replace("old_", "behavior_"): value for name, value in batch.items()})
    loss.close_update()
    log_probs = batch.pop("log_probs")
    assert torch.autograd.gradcheck(lambda x: loss(x, **batch)[0], log_probs, eps=1e-7, atol=1e-5)


def test_share_weighs_tokens_as_the_aggregation_and_the_token_weight_say():
    batch = micro_batch(3, torch.float64)
    mask = batch["action_mask"].double()
    ratio = (batch["log_probs"] - batch["old_log_probs"]).detach().exp()
    for arguments, weight in (
        ({}, mask),
        (dict(token_level_loss=False), mask / mask.sum(-1, keepdim=True)),
        (dict(token_level_loss=False, clip_config=ClipConfig.preset("released")), mask),
        (dict(token_weight="rollout_prob"), mask * batch["old_log_probs"].exp()),
    ):
        loss = BapoPolicyLoss(**arguments)
        loss(**batch)
        assert found_by(loss) == [find_clip_bounds(ratio, batch["advantages"], weight, loss.rule.config)]


def assert_the_search_weighs_by(weight: torch.Tensor, batch: dict[str, torch.Tensor], **settings) -> ClipBounds:
    """Assert it for a loss with these settings, with and without a tally before the update; return the bounds."""
    ratio = (batch["log_probs"] - batch["old_log_probs"]).detach().exp()
    expected = find_clip_bounds(ratio, batch["advantages"], weight, ClipConfig())
    for is_tallied in (False, True):
        loss = BapoPolicyLoss(clip_config=ClipConfig(), **settings)
        if is_tallied:
            loss.tally(**{name.replace("old_", "behavior_"): value for name, value in batch.items()})
            loss.close_update()
        loss(**batch)
        (found,) = found_by(loss)
        assert float(found.initial_share) == pytest.approx(float(expected.initial_share), rel=1e-12)
        assert (found.lower, found.upper) == (expected.lower, expected.upper)
    return expected


@pytest.mark.parametrize("given", [dict(is_proximal=True), dict(tapered="token"), dict(tapered="sequence")], ids=str)
def test_the_search_weighs_tokens_by_the_behavior_policy_where_the_ratio_is_against_a_later_one(given):
    batch = micro_batch(5, torch.float64)
    weight = batch["action_mask"].double() * batch["rollout_log_probs"].exp()
    if level := given.get("tapered"):
        stale = batch["old_log_probs"] - batch["rollout_log_probs"]
        weight = weight * tapered_weights(stale, batch["advantages"], batch["action_mask"], level)
    assert_the_search_weighs_by(weight, batch, token_weight="rollout_prob", **given)


CORRECTIONS = [
    dict(is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.0, 1.1)),
    dict(is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.9, 1.1)),
    dict(is_correction_level="token", is_correction_threshold=(0.9, 1.1)),
    dict(is_correction_level="seq", is_correction_threshold=(0.95, 1.05)),
    *(
        dict(is_correction_level=level, is_correction_gating=gating, is_correction_threshold=(0.0, threshold))
        for level in ("token", "seq")
        for gating, threshold in (("tv", 0.02), ("binary_kl", 0.008))
    ),
]


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda given: " ".join(map(str, given.values())))
@pytest.mark.parametrize("token_weight", ["none", "rollout_prob"])
def test_the_share_weighs_tokens_by_their_weight_in_the_loss_with_every_correction(correction, token_weight):
    from openrlhf.models import PolicyLoss

    from openrlhf_bapo.openrlhf.policy_loss import correction_weights

    batch = micro_batch(4, torch.float64)
    # At a ratio of 1 and an advantage of -1, the gradient of a sum over tokens is the token's weight.
    log_probs, action_mask = batch["old_log_probs"].clone().requires_grad_(), batch["action_mask"]
    others = dict(action_mask=action_mask, rollout_log_probs=batch["rollout_log_probs"], batch_num_tokens=1.0)
    one = -torch.ones_like(log_probs)
    PolicyLoss(**correction)(log_probs, batch["old_log_probs"], one, **others)[0].backward()
    weight = log_probs.grad
    denominators = batch["old_log_probs"], batch["rollout_log_probs"]
    found = correction_weights(PolicyLoss(**correction), *denominators, action_mask) * action_mask
    torch.testing.assert_close(found, weight, rtol=1e-12, atol=0)
    assert len(weight[action_mask].unique()) > 2 and (weight[action_mask] != 1).any()
    if token_weight == "rollout_prob":
        weight = weight * batch["rollout_log_probs"].exp()

    ratio = (batch["log_probs"] - batch["old_log_probs"]).detach().exp()
    expected = assert_the_search_weighs_by(weight, batch, token_weight=token_weight, **correction)
    assert (
        expected.initial_share != find_clip_bounds(ratio, batch["advantages"], action_mask, ClipConfig()).initial_share
    )


def test_a_rules_weights_are_times_the_correction_of_the_ratios_denominator():
    batch = micro_batch(4, torch.float64)
    correction = dict(is_correction_level="token", is_correction_mode="clip", is_correction_threshold=(0.0, 1.1))
    loss, mask = BapoPolicyLoss(rule=TaperedWeights("token"), **correction), batch["action_mask"]
    loss(**batch)[0].backward()
    ratio = (batch["log_probs"] - batch["old_log_probs"]).detach().exp()
    weights = torch.where(batch["advantages"] > 0, 1.0, ratio.clamp(max=1))
    weights = weights * (batch["old_log_probs"] - batch["rollout_log_probs"]).exp().clamp(max=1.1)
    expected = -weights * batch["advantages"] * mask / mask.sum()
    torch.testing.assert_close(batch["log_probs"].grad, expected)


def test_bounds_set_for_the_update_serve_every_micro_batch_until_unset():
    loss = BapoPolicyLoss(clip_config=ClipConfig())
    batches = [micro_batch(seed, torch.float64) for seed in (5, 6)]
    for batch in batches:
        loss.tally(*list(batch.values())[:4])
    loss.close_update()
    for batch in batches:
        loss(**batch)
    assert len(loss.updates) == 1
    loss.search_in_each_call()
    loss(**batches[0])
    assert len(loss.updates) == 2


@pytest.mark.parametrize("rounding", [-1e-9, 1e-9])  # the bound's, in float32: a comparison in float64 would err
@pytest.mark.parametrize(("side", "log_ratios"), [("lower", (-0.4, -0.3, -0.2)), ("upper", (0.2, 0.6, 1.0))])
def test_a_float32_ratio_on_a_bound_keeps_its_gradient_where_the_tally_counts_it_as_inside(side, log_ratios, rounding):
    for log_ratio in log_ratios:
        log_probs = torch.tensor([[log_ratio]], requires_grad=True)
        bound = log_probs.exp().item() * (1 + rounding)
        fixed = {f"ratio_{side}_start": bound, f"ratio_{side}_max": bound}
        loss = BapoPolicyLoss(clip_config=ClipConfig(contribution="gradient", **fixed))
        advantage = 1.0 if side == "upper" else -1.0
        loss(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1))[0].backward()
        (found,) = found_by(loss)
        assert float(found.clip_frac_positive + found.clip_frac_negative) == 0, bound
        assert float(log_probs.grad) == pytest.approx(-advantage * bound, rel=1e-6), bound


def test_without_a_mask_every_token_counts():
    batch = micro_batch(7, torch.float64)
    results = []
    for mask in (None, torch.ones_like(batch["advantages"])):
        loss = BapoPolicyLoss(clip_config=ClipConfig())
        loss(batch["log_probs"], batch["old_log_probs"], batch["advantages"], mask)
        results += found_by(loss)
    assert results[0] == results[1]


def test_a_rule_of_weights_reports_openrlhfs_kl_to_the_behavior_policy():
    batch = micro_batch(10, torch.float64)
    _, _, ppo_kl, *_ = BapoPolicyLoss(rule=TaperedWeights())(**batch)
    assert float(ppo_kl) == pytest.approx(float(upstream_loss()(**batch)[2]))


def test_gspo_and_unknown_weights_are_refused():
    with pytest.raises(ValueError, match="gspo"):
        BapoPolicyLoss(clip_config=ClipConfig(), policy_loss_type="gspo")
    with pytest.raises(ValueError, match=r"token_weight 'all'.*rollout_prob"):
        BapoPolicyLoss(clip_config=ClipConfig(), token_weight="all")
