"""Clip rules: what all of them promise, and that a preset is the same rule in every framework."""

from dataclasses import astuple
from functools import partial

import pipeline
import presets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import as_tensors, clip_configs, tokens
from test_trl import arguments
from trl import GRPOTrainer

from openrlhf_bapo import BapoPolicyLoss, ClipConfig, SmoothingConfig
from openrlhf_bapo.core.bounds_metrics import bounds_metrics
from openrlhf_bapo.core.clip_bounds import ContributionTally, find_clip_bounds, tally_at_bounds
from openrlhf_bapo.core.clip_config import PRESETS
from openrlhf_bapo.core.clip_rules import (
    ClipRule,
    FixedBounds,
    SearchedBounds,
    SteadyBounds,
    Tokens,
    UpdateBounds,
    importance_ratio,
    share_weights,
)
from openrlhf_bapo.trl import BapoGRPOTrainer

RULES = {
    "fixed": lambda config: FixedBounds(config.ratio_lower_start, config.ratio_upper_start),
    "searched": SearchedBounds,
    "steady": partial(SteadyBounds, smoothing=SmoothingConfig(2.0)),
    "steady by tally": partial(SteadyBounds, smoothing=SmoothingConfig(2.0, of="tally")),
}
of_every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)
updates = st.lists(tokens(min_size=1, max_size=12), min_size=1, max_size=4)


def as_tokens(token_list) -> Tokens:
    ratio, advantages, weight = as_tensors(token_list)
    return Tokens(ratio.log(), torch.zeros_like(ratio), advantages, weight)


def closed(rule: ClipRule, *micro_batches) -> UpdateBounds:
    for token_list in micro_batches:
        rule.tally(as_tokens(token_list))
    return rule.close_update()


def bounds_of(rule: ClipRule) -> tuple[float, float]:
    return float(rule.lower), float(rule.upper)


@of_every_rule
@given(updates, clip_configs(), st.data())
def test_a_rule_gives_the_same_bounds_and_metrics_however_its_updates_are_split(make, stream, config, data):
    whole, split = make(config), make(config)
    for token_list in stream:
        cut = data.draw(st.integers(0, len(token_list)))
        results = [closed(whole, token_list), closed(split, token_list[:cut], token_list[cut:])]
        assert bounds_of(whole) == pytest.approx(bounds_of(split), abs=1e-12)
        by_whole, by_split = (bounds_metrics([update]) for update in results)
        assert by_whole == pytest.approx(by_split, rel=1e-9, abs=1e-12, nan_ok=True)


@of_every_rule
@given(updates, clip_configs(), st.data())
def test_a_rule_whose_state_was_saved_goes_on_as_the_unbroken_one(make, stream, config, data):
    unbroken, resumed = make(config), make(config)
    cut = data.draw(st.integers(0, len(stream)))
    for token_list in stream[:cut]:
        closed(unbroken, token_list)
    resumed.load_state_dict({name: value.clone() for name, value in unbroken.state_dict().items()})
    assert bounds_of(resumed) == bounds_of(unbroken)
    for token_list in stream[cut:]:
        closed(unbroken, token_list)
        closed(resumed, token_list)
        assert bounds_of(resumed) == bounds_of(unbroken)


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
def test_an_update_is_closed_with_the_tally_that_the_ranks_have_together(make):
    one, other = [(1.1, 1.0, 1.0)], [(0.9, -2.0, 1.0), (1.3, 0.5, 1.0)]
    alone, ranked = make(ClipConfig()), make(ClipConfig())
    of_other = make(ClipConfig())
    of_other.tally(as_tokens(other))
    expected = closed(alone, one, other)
    ranked.tally(as_tokens(one))
    found = ranked.close_update(lambda tally: tally + of_other._sums)
    assert bounds_metrics([found]) == pytest.approx(bounds_metrics([expected]))


@given(tokens(min_size=1), clip_configs())
def test_searched_bounds_are_those_of_the_search_on_their_own_update(token_list, config):
    rule = SearchedBounds(config)
    assert rule.needs_tally_first and bounds_of(rule) == (config.lower_grid()[0], config.upper_grid()[0])
    update = closed(rule, token_list)
    expected = find_clip_bounds(as_tokens(token_list).ratio, *as_tensors(token_list)[1:], config)
    assert update.used is update.found
    assert [float(x) for x in astuple(update.used)] == pytest.approx([float(x) for x in astuple(expected)], nan_ok=True)
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


def test_steady_bounds_without_smoothing_are_refused():
    with pytest.raises(ValueError, match="smoothing None is not allowed"):
        SteadyBounds(ClipConfig())


@of_every_rule
def test_only_fixed_bounds_do_not_search(make):
    rule = make(ClipConfig())
    assert rule.searches == (not isinstance(rule, FixedBounds))
    assert (closed(rule, [(1.1, 1.0, 1.0)]).found is not None) == rule.searches


@pytest.mark.parametrize("bounds", [(1.1, 1.2), (0.8, 0.9), (float("nan"), 1.2)])
def test_fixed_bounds_that_leave_1_outside_are_refused(bounds):
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


def in_openrlhf(preset: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    config, found = ClipConfig.preset(preset), []
    loss = BapoPolicyLoss(clip_config=config, dual_clip=config.dual_clip)
    for update in presets.make_updates():
        loss.search_in_each_call()
        if loss.rule.needs_tally_first and config.scope == "update":
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
        trainer._compute_loss(trainer.model, micro_batch).backward()
        found.append((1 - trainer.epsilon_low, 1 + trainer.epsilon_high, log_probs[step].grad))
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("clip_rules"))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_plain_loops_bounds_and_clipped_tokens_in_openrlhf(preset):
    presets.assert_same(in_openrlhf(preset), preset)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("given", [str, ClipConfig.preset], ids=["name", "config"])
def test_a_preset_has_the_plain_loops_bounds_and_clipped_tokens_in_trl(preset, given, directory, monkeypatch):
    overrides = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=2)
    trainer = BapoGRPOTrainer(**arguments(directory, **overrides), bapo=given(preset))
    presets.assert_same(in_trl(trainer, monkeypatch), preset)


def test_the_released_recipe_counts_tokens_in_trl_where_the_loss_is_a_mean_of_each_response(directory, monkeypatch):
    overrides = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=2)
    trainer = BapoGRPOTrainer(**arguments(directory, **overrides, loss_type="grpo"), bapo="released")
    presets.assert_same(in_trl(trainer, monkeypatch), "released")
    shares = []
    for each in (each for update in presets.make_updates() for each in update):
        ratio = importance_ratio(each["log_probs"], each["old_log_probs"])
        found = find_clip_bounds(ratio, each["advantages"], each["mask"], ClipConfig.preset("released"))
        shares.append(found.initial_share.item())
    assert trainer._metrics["train"]["bapo/initial_share"] == pytest.approx(shares)


class BoundsPerToken(ClipRule):
    """Bounds that depend on each token's probability at rollout."""

    searches = False

    def __init__(self) -> None:
        self.config = ClipConfig()
        self.lower, self.upper = torch.tensor([0.9, 1.1], dtype=torch.float64).unbind()

    def bounds(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        room = 0.2 / tokens.behavior_log_probs.exp()
        return 1 - room, 1 + room

    def _tally(self, ratio, advantages, mask) -> ContributionTally:
        return tally_at_bounds(ratio, advantages, mask, self.lower, self.upper)

    def _update(self, tally: ContributionTally) -> UpdateBounds:
        raise NotImplementedError


def test_a_rule_with_bounds_per_token_clips_in_openrlhfs_loss_and_in_trls(directory, monkeypatch):
    trained = []
    for update in presets.make_updates():
        for each in update:
            probability, behavior = each["log_probs"].exp(), each["old_log_probs"].exp()
            clipped = torch.where(each["advantages"] > 0, probability - behavior > 0.2, behavior - probability > 0.2)
            trained.append(~clipped & (each["mask"] > 0))
    loss = BapoPolicyLoss(rule=BoundsPerToken())
    for each, expected in zip((each for update in presets.make_updates() for each in update), trained, strict=True):
        log_probs = each["log_probs"].requires_grad_()
        loss(log_probs, *list(each.values())[1:])[0].backward()
        assert torch.equal(log_probs.grad != 0, expected)
    overrides = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=2)
    trainer = BapoGRPOTrainer(**arguments(directory, **overrides), bapo="readme")
    trainer.clip_rule = BoundsPerToken()
    monkeypatch.setattr(trainer, "_close_update", lambda: None)
    assert all(
        torch.equal(gradient != 0, expected)
        for (_, _, gradient), expected in zip(in_trl(trainer, monkeypatch), trained, strict=True)
    )
