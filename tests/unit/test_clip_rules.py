"""Clip rules: what all of them promise, and that a preset is the same rule in every framework."""

import math
import re
from dataclasses import replace
from functools import partial

import pipeline
import presets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import as_tensors, as_tokens, clip_configs, closed, random_tokens, tokens
from test_trl import arguments
from trl import GRPOTrainer

from openrlhf_bapo import BapoPolicyLoss, ClipConfig, SmoothingConfig
from openrlhf_bapo.rules.bounds_metrics import bounds_metrics
from openrlhf_bapo.rules.clip_bounds import find_clip_bounds
from openrlhf_bapo.rules.clip_config import PRESETS
from openrlhf_bapo.rules.clip_rules import (
    ClipRule,
    FixedBounds,
    SearchedBounds,
    SteadyBounds,
    Tokens,
    importance_ratio,
    share_weights,
)
from openrlhf_bapo.rules.other_rules import (
    BalancedWeights,
    DivergenceBounds,
    SecondMomentBounds,
    TaperedWeights,
    as_clip_rule,
)
from openrlhf_bapo.trl import BapoGRPOTrainer

RULES = {
    "fixed": lambda config: FixedBounds(config.ratio_lower_start, config.ratio_upper_start),
    "searched": SearchedBounds,
    "steady": partial(SteadyBounds, smoothing=SmoothingConfig(2.0)),
    "steady by tally": partial(SteadyBounds, smoothing=SmoothingConfig(2.0, of="tally")),
    "m2": lambda _: SecondMomentBounds(),
    "m2 averaged": lambda _: SecondMomentBounds(half_life=2.0),
    "divergence": lambda _: DivergenceBounds(),
    "topr": lambda _: TaperedWeights(),
    "balanced": lambda _: BalancedWeights(),
    "balanced averaged": lambda _: BalancedWeights(half_life=2.0, level="sequence"),
}
of_every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)
updates = st.lists(tokens(min_size=1, max_size=12), min_size=1, max_size=4)


def bounds_of(rule: ClipRule) -> tuple[float, float]:
    return float(rule.lower), float(rule.upper)


def assert_same_state(rule: ClipRule, other: ClipRule, rtol: float = 0.0, atol: float = 0.0) -> None:
    torch.testing.assert_close(rule.state_dict(), other.state_dict(), rtol=rtol, atol=atol, equal_nan=True)


@of_every_rule
@given(updates, clip_configs(), st.data())
def test_a_rule_gives_the_same_bounds_and_metrics_however_its_updates_are_split(make, stream, config, data):
    whole, split = make(config), make(config)
    for token_list in stream:
        cut = data.draw(st.integers(0, len(token_list)))
        results = [closed(whole, token_list), closed(split, token_list[:cut], token_list[cut:])]
        assert_same_state(whole, split, rtol=1e-9, atol=1e-12)
        by_whole, by_split = (bounds_metrics([update]) for update in results)
        assert by_whole == pytest.approx(by_split, rel=1e-9, abs=1e-12, nan_ok=True)


@of_every_rule
def test_every_tensor_of_a_rule_follows_the_device_of_the_tokens(make):
    rule = make(ClipConfig())
    rule.of_a_subclass = torch.ones(2)
    closed(rule, random_tokens())
    rule.to(torch.device("meta"))
    assert {value.device.type for value in (rule.of_a_subclass, *rule.state_dict().values())} == {"meta"}


def test_a_token_on_a_bound_is_inside():
    tokens = random_tokens()
    on_bounds = torch.where(tokens.advantages > 0, 1.25, 0.75)
    tokens.__dict__["ratio"] = on_bounds
    assert torch.equal(FixedBounds(0.75, 1.25).gradient_weights(tokens), on_bounds)
    assert not FixedBounds(0.76, 1.24).gradient_weights(tokens).any()


@of_every_rule
@given(updates, clip_configs(), st.data())
def test_a_rule_whose_state_was_saved_goes_on_as_the_unbroken_one(make, stream, config, data):
    unbroken, resumed = make(config), make(config)
    cut = data.draw(st.integers(0, len(stream)))
    for token_list in stream[:cut]:
        closed(unbroken, token_list)
    resumed.load_state_dict({name: value.clone() for name, value in unbroken.state_dict().items()})
    assert_same_state(resumed, unbroken)
    for token_list in stream[cut:]:
        used = [bounds_metrics([closed(rule, token_list)]) for rule in (unbroken, resumed)]
        assert used[0] == pytest.approx(used[1], rel=0, abs=0, nan_ok=True)
        assert_same_state(resumed, unbroken)


@of_every_rule
def test_a_rule_reads_no_value_on_the_host(make):
    meta = torch.ones(3, device="meta")  # a meta tensor has no values to read
    rule = make(ClipConfig())
    for _ in range(2):
        rule.tally(Tokens(meta, meta, meta, meta))
        assert rule.has_open_update
        update = rule.close_update()
        assert update.used.positive_share.is_meta and not rule.has_open_update


@of_every_rule
def test_values_under_a_mask_of_0_may_be_anything(make):
    clean = random_tokens()
    active = clean.weight > 0
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 1e300]).repeat(12).view(4, 12)
    columns = (clean.log_probs, clean.behavior_log_probs, clean.advantages)
    dirty = Tokens(*(torch.where(active, x, garbage.roll(i)) for i, x in enumerate(columns)), clean.weight)
    metrics, weights = [], []
    for tokens_ in (clean, dirty):
        rule = make(ClipConfig())
        metrics.append(bounds_metrics([closed(rule, tokens_)]))
        weights.append(rule.gradient_weights(tokens_)[active])
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-12, nan_ok=True)
    torch.testing.assert_close(*weights, rtol=1e-12, atol=0)


@of_every_rule
def test_float32_tokens_give_the_bounds_and_weights_of_float64(make):
    rules = make(ClipConfig()), make(ClipConfig())
    both = random_tokens(), random_tokens(dtype=torch.float32)
    metrics = [bounds_metrics([closed(rule, tokens_)]) for rule, tokens_ in zip(rules, both, strict=True)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, nan_ok=True)
    double, single = (rule.gradient_weights(tokens_) for rule, tokens_ in zip(rules, both, strict=True))
    assert single.dtype == torch.float32
    torch.testing.assert_close(double, single.double(), rtol=1e-5, atol=0)
    assert_same_state(*rules, rtol=1e-5)


EXTREMES = RULES | {
    "an upper bound of infinity": lambda _: FixedBounds(0.8, math.inf),
    "a lower bound of -infinity": lambda _: FixedBounds(-math.inf, 1.2),
    "a lower bound below 0": lambda _: FixedBounds(-0.5, 1.2),
    "no bounds": lambda _: FixedBounds(0.0, math.inf),
}


@pytest.mark.parametrize("make", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_rule_has_its_shares_for_every_type_and_number_of_tokens_and_the_largest_ratios(make, dtype):
    for size in (8, 1536):
        generator = torch.Generator().manual_seed(size)
        behavior = -3 * torch.rand(1, size, generator=generator)
        log_probs = behavior + 0.5 * torch.randn(1, size, generator=generator)
        log_probs[0, 0] += 30
        log_probs[0, -1] -= 30
        advantages = torch.randn(1, size, generator=generator)
        log_probs[0, 1:3], advantages[0, 1:3] = behavior[0, 1:3], torch.tensor([0.5, -0.5])  # inside, of both signs
        columns = (x.to(dtype) for x in (log_probs, behavior, advantages, torch.ones(1, size)))
        tokens_, rule = Tokens(*columns), make(ClipConfig())
        for _ in range(2):
            used = closed(rule, tokens_).used
            for share in (used.positive_share, used.surrogate_share, used.gradient_share):
                assert 0 <= float(share) <= 1, (size, used)
            assert bool(rule.gradient_weights(tokens_).isfinite().all())


@of_every_rule
def test_an_update_with_a_value_that_is_not_finite_leaves_no_trace(make):
    first = random_tokens()
    stain = replace(first, log_probs=first.log_probs.clone())
    stain.log_probs[3, 0] = math.nan  # of a negative advantage: some rules give positive tokens the weight 1
    last = replace(first, log_probs=first.log_probs - 0.3)
    stained, clean = make(ClipConfig()), make(ClipConfig())
    for rule, updates_ in ((stained, (first, stain, last)), (clean, (first, last))):
        for update in updates_:
            closed(rule, update)
    assert_same_state(stained, clean, rtol=1e-12)
    assert all(bool(value.isfinite().all()) for value in stained.state_dict().values())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("make", [FixedBounds(0.8, 1.2), SearchedBounds(ClipConfig())], ids=["fixed", "searched"])
def test_a_ratio_that_is_not_finite_has_no_share_whatever_its_advantages_sign(make, advantage):
    used = closed(make, [(math.nan, advantage, 1.0), (1.0, 1.0, 1.0), (1.0, -1.0, 1.0)]).used
    assert math.isnan(used.surrogate_share) and math.isnan(used.gradient_share) and not used.reached


@of_every_rule
@pytest.mark.parametrize("token_level_loss", [True, False])
def test_gradient_weights_are_the_gradient_of_openrlhfs_loss(make, token_level_loss):
    tokens_ = random_tokens()
    loss = BapoPolicyLoss(rule=make(ClipConfig()), token_level_loss=token_level_loss)
    log_probs = tokens_.log_probs.clone().requires_grad_()
    for _ in range(2):  # a rule that follows earlier updates has bounds or weights in the second
        log_probs.grad = None
        loss(log_probs, tokens_.behavior_log_probs, tokens_.advantages, tokens_.weight)[0].backward()
        expected = -loss.rule.gradient_weights(tokens_) * tokens_.advantages
        per_response = tokens_.weight / tokens_.weight.sum(1, keepdim=True) / len(log_probs)
        expected = expected * (tokens_.weight / tokens_.weight.sum() if token_level_loss else per_response)
        torch.testing.assert_close(log_probs.grad, expected, rtol=1e-6, atol=0)
        loss.close_update()
    assert not torch.equal(expected, -tokens_.ratio * tokens_.advantages * per_response)


@given(tokens(min_size=1), clip_configs())
def test_searched_bounds_are_those_of_the_search_on_their_own_update(token_list, config):
    rule = SearchedBounds(config)
    assert rule.needs_tally_first and bounds_of(rule) == (config.lower_grid()[0], config.upper_grid()[0])
    update = closed(rule, token_list)
    expected = find_clip_bounds(as_tokens(token_list).ratio, *as_tensors(token_list)[1:], config)
    assert update.used is update.found
    torch.testing.assert_close(vars(update.used), vars(expected), equal_nan=True)
    assert bounds_of(rule) == (float(expected.lower), float(expected.upper))


def test_fixed_bounds_stay_and_have_no_search_in_their_metrics():
    rule = FixedBounds(0.8, 1.28)
    update = closed(rule, [(1.5, 1.0, 1.0), (0.5, -1.0, 1.0), (0.9, -1.0, 1.0)])
    metrics = bounds_metrics([update])
    assert bounds_of(rule) == (metrics["bapo/clip_low"], metrics["bapo/clip_high"]) == (0.8, 1.28)
    assert metrics["bapo/positive_share"] == pytest.approx(1.28 / (1.28 + 0.8 + 0.9))
    assert (metrics["bapo/clip_frac_positive"], metrics["bapo/clip_frac_negative"]) == (1.0, 0.5)
    assert not {"bapo/initial_share", "bapo/target_reached", "bapo/found_low"} & metrics.keys()
    assert not rule.needs_tally_first and not rule.searches


@of_every_rule
def test_a_rule_says_whether_it_has_weights_solves_for_its_bounds_and_follows_earlier_updates(make):
    rule = make(ClipConfig())
    assert rule.has_weights == (rule.weights(random_tokens()) is not None)
    assert rule.searches == (not isinstance(rule, FixedBounds | DivergenceBounds | TaperedWeights))
    assert (closed(rule, [(1.1, 1.0, 1.0)]).found is not None) == isinstance(rule, SearchedBounds | SteadyBounds)
    for ratio in (0.2, 3.0):
        closed(rule, [(ratio, 1.0, 1.0), (ratio, -1.5, 1.0)])
    before, after = make(ClipConfig()).state_dict(), rule.state_dict()
    has_changed = before.keys() != after.keys() or any(before[name] != after[name] for name in before)
    assert has_changed == (rule.follows_updates or rule.needs_tally_first)
    assert not (rule.follows_updates and rule.needs_tally_first)


def test_steady_bounds_without_smoothing_and_fixed_bounds_that_leave_1_outside_are_refused():
    assert (FixedBounds(1.0, 1.2).lower, FixedBounds(0.8, 1.0).upper) == (1, 1)
    with pytest.raises(ValueError, match="smoothing None is not allowed"):
        SteadyBounds(ClipConfig())
    for bounds in ((1.1, 1.2), (0.8, 0.9), (math.nan, 1.2)):
        with pytest.raises(ValueError, match="must satisfy lower <= 1 <= upper"):
            FixedBounds(*bounds)


@pytest.mark.parametrize("log_ratio", [25.0, -25.0])
def test_a_log_ratio_beyond_20_counts_as_20(log_ratio):
    found = importance_ratio(torch.tensor([log_ratio]), torch.zeros(1))
    assert torch.equal(found, torch.tensor([20.0]).copysign(torch.tensor(log_ratio)).exp())


def test_a_tokens_weight_in_a_share_is_its_weight_in_the_loss_and_one_for_a_ratio_target():
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    per_response = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0], [0.0] * 4])
    for mean_over, expected in (("update", mask), ("sequence", per_response), ("micro_batch", mask.double() / 5)):
        assert torch.equal(share_weights(mask, ClipConfig(), mean_over).double(), expected.double())
        assert torch.equal(share_weights(mask, ClipConfig.preset("released"), mean_over), mask)


# ---- In the frameworks ----


def in_openrlhf(name: str) -> list[tuple]:
    rule, found = as_clip_rule(name), []
    loss = BapoPolicyLoss(rule=rule, dual_clip=rule.config.dual_clip)
    for update in presets.make_updates():
        loss.search_in_each_call()
        if rule.needs_tally_first and rule.config.scope == "update":
            for each in update:
                loss.tally(*each.values())
        loss.close_update()
        for each in update:
            log_probs = each["log_probs"].requires_grad_()
            loss(log_probs, *list(each.values())[1:])[0].backward()
            found.append((1 - loss.clip_eps_low, 1 + loss.clip_eps_high, log_probs.grad))
    return found


def in_trl(trainer: BapoGRPOTrainer, monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    found, inputs, log_probs = [], [], []
    for each in (each for update in presets.make_updates() for each in update):
        ids, mask = torch.full_like(each["mask"], len(inputs)), each["mask"]
        inputs.append(dict(prompt_ids=ids, prompt_mask=mask, completion_ids=ids, completion_mask=mask))
        inputs[-1] |= dict(advantages=each["advantages"], old_per_token_logps=each["old_log_probs"])
        inputs[-1] |= dict(num_items_in_batch=mask.sum())
        log_probs.append(each["log_probs"].requires_grad_())

    def policy(self, model, ids, *args, **kwargs):
        given = log_probs[int(ids[0, 0])]  # of the micro-batch with this number
        return given, torch.zeros_like(given), None

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", policy)
    trainer.model.train()
    num = trainer.current_gradient_accumulation_steps = presets.NUM_MICRO_BATCHES
    for step, micro_batch in enumerate(inputs):
        trainer._step, trainer._buffered_inputs = step, inputs[step - step % num :][:num]
        if step % num == 0:
            trainer.get_batch_samples(iter(trainer._buffered_inputs), num, "cpu")
        trainer._compute_loss(trainer.model, micro_batch).backward()
        found.append((1 - trainer.epsilon_low, 1 + trainer.epsilon_high, log_probs[step].grad))
        if (step + 1) % num == 0:
            trainer.callback_handler.on_optimizer_step(trainer.args, trainer.state, trainer.control)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("clip_rules"))


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_rule_has_the_plain_loops_bounds_and_gradient_in_openrlhf(name):
    presets.assert_same(in_openrlhf(name), name)


TWO_MICRO_BATCHES = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=2)


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_rule_has_the_plain_loops_bounds_and_gradient_in_trl(name, directory, monkeypatch):
    trainer = BapoGRPOTrainer(**arguments(directory, **TWO_MICRO_BATCHES), bapo=name)
    presets.assert_same(in_trl(trainer, monkeypatch), name)


def test_a_rule_is_given_to_trl_by_its_name_its_settings_or_itself(directory):
    trainers = arguments(directory, **TWO_MICRO_BATCHES)
    assert BapoGRPOTrainer(**trainers, bapo=ClipConfig.preset("paper")).clip_rule.config == ClipConfig.preset("paper")
    rule = BalancedWeights(half_life=5.0)
    assert BapoGRPOTrainer(**trainers, bapo=rule).clip_rule is rule
    assert BapoGRPOTrainer(**trainers, bapo="topr").clip_rule.level == "sequence"
    for name in PRESETS:  # as a whole, smoothing and dual clip included
        rule = BapoGRPOTrainer(**trainers, bapo=name).clip_rule
        assert rule.config == ClipConfig.preset(name) and rule.follows_updates == (name == "steady")
    with pytest.raises(ValueError, match=r"clip rule 'mine' is unknown; allowed: readme, .*, m2, .*, balanced"):
        BapoGRPOTrainer(**trainers, bapo="mine")


@pytest.mark.parametrize("given", [None, 3, ["paper"], {"preset": "paper"}, ClipConfig])
def test_what_is_no_rule_is_refused_by_its_value(given):
    with pytest.raises(ValueError, match=re.escape(f"clip rule {given!r} is unknown; allowed: readme, ")):
        as_clip_rule(given)


def test_the_released_recipe_counts_tokens_in_trl_where_the_loss_is_a_mean_of_each_response(directory, monkeypatch):
    trainer = BapoGRPOTrainer(**arguments(directory, **TWO_MICRO_BATCHES, loss_type="grpo"), bapo="released")
    for (*_, gradient), (*_, plain) in zip(in_trl(trainer, monkeypatch), presets.plain_loop("released"), strict=True):
        assert torch.equal(gradient != 0, plain != 0)
    shares = []
    for each in (each for update in presets.make_updates() for each in update):
        ratio = importance_ratio(each["log_probs"], each["old_log_probs"])
        found = find_clip_bounds(ratio, each["advantages"], each["mask"], ClipConfig.preset("released"))
        shares.append(found.initial_share.item())
    assert trainer._metrics["train"]["bapo/initial_share"] == pytest.approx(shares)
