"""The Entropy-Clip Rule: the tally compared with a plain loop, and its prediction with true softmax policies."""

import math
from itertools import product

import pipeline
import presets
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import advantages, ratios, weights
from test_clip_rules import in_trl
from test_trl import arguments

from openrlhf_bapo import BapoPolicyLoss, ClipConfig
from openrlhf_bapo.rules.clip_rules import ClipRule, FixedBounds, Tokens, importance_ratio
from openrlhf_bapo.rules.entropy_rule import FATES, QUADRANTS, EntropyRule, entropy_changes, tally_entropy
from openrlhf_bapo.rules.other_rules import TaperedWeights
from openrlhf_bapo.trl import BapoGRPOTrainer

GARBAGE = (math.nan, math.inf, -math.inf, -1.0, 1e300)


def trained_tokens(min_size=0, max_size=40):
    """Lists of (log-prob, ratio, advantage, gradient weight, weight): left out, at weight r, at another weight."""
    log_probs = st.one_of(st.just(0.0), st.floats(-3, 0), st.floats(-100, 0), st.floats(-1e-3, 1e-9))
    token = st.tuples(log_probs, ratios(), advantages(), st.sampled_from([0.0, 1.0, 0.3]), weights())
    as_trained = token.map(lambda t: (*t[:3], t[3] * t[1], t[4]))
    return st.lists(as_trained, min_size=min_size, max_size=max_size)


# Both signs and fates, far from the mean of log pi, which is about -0.7, on either side of it, and near it.
OF_EVERY_KIND = [
    (log_prob, ratio, advantage * (1 - log_prob), ratio * kept, weight)  # the covariance is not 0
    for log_prob, ratio, advantage, kept, weight in product(
        (-2.5, -1.0, -0.75, -0.7, -0.65, -0.2, -1e-5, 0.0), (0.7, 1.0, 1.4), (-2.0, 0.0, 0.5), (0, 1), (0.0, 0.25)
    )
]


def as_tensors(token_list) -> list[torch.Tensor]:
    """Arguments of `tally_entropy`, each [num_tokens], float64."""
    return [*torch.tensor(token_list, dtype=torch.float64).reshape(-1, 5).unbind(1)]


class GivenWeights(FixedBounds):
    """The gradient weights of each token, as given."""

    def __init__(self, weights: torch.Tensor) -> None:
        super().__init__(0.8, 1.2)
        self._weights = weights

    def weights(self, tokens: Tokens) -> torch.Tensor:
        return self._weights


def as_rule_and_tokens(token_list) -> tuple[GivenWeights, Tokens]:
    log_probs, ratio, advantages, weights, weight = as_tensors(token_list)
    return GivenWeights(weights), Tokens(log_probs, log_probs - ratio.log(), advantages, weight)


def metrics_of(*micro_batches) -> dict[str, float]:
    """Return the metrics of one update."""
    rule = EntropyRule()
    for token_list in micro_batches:
        rule.tally(*as_rule_and_tokens(token_list))
    rule.close_update()
    return rule.take_metrics()


def place_of(log_prob: float) -> float:
    """Return the place on the scale whose unit is a bin; the first and the last bin have no outer edge."""
    return min(max(4 * math.log2(max(-log_prob, 2**-11) * 2**11), 1.0), 63.0)


def loop(token_list) -> list[tuple[str, str, float, bool]]:
    """Return (quadrant, fate, part of the prediction, whether the mean log-prob may lie in its bin) of each token."""
    some = [token for token in token_list if token[4] > 0]
    mean = math.fsum(m * r * x for x, r, *_, m in some) / math.fsum(m * r for _, r, *_, m in some)
    found = []
    for x, r, advantage, w, m in some:
        part = -m * (w or r) * advantage * (x - mean) / math.fsum(token[4] for token in some)
        quadrant = f"{'positive' if advantage > 0 else 'negative'}_{'high' if x > mean else 'low'}"
        found.append((quadrant, "trained" if w else "left_out", part, abs(place_of(x) - place_of(mean)) < 1.001))
    return found


@given(trained_tokens(), st.integers(0, 40), st.lists(st.tuples(*[st.sampled_from(GARBAGE)] * 4), max_size=8))
@example(OF_EVERY_KIND, 100, [GARBAGE[:4], GARBAGE[1:]])
def test_agrees_with_a_plain_loop_over_the_tokens_in_two_micro_batches_one_with_garbage_under_the_mask(
    token_list, cut, garbage
):
    found = metrics_of(token_list[:cut], token_list[cut:] + [(*values, 0.0) for values in garbage])
    if not any(token[4] > 0 for token in token_list):
        assert all(map(math.isnan, found.values()))
        return
    tokens = loop(token_list)
    rounding = 1e-9 * math.fsum(abs(part) for _, _, part, _ in tokens) + 1e-9
    for fate in FATES:
        expected = math.fsum(part for _, other, part, _ in tokens if other == fate)
        total = math.fsum(found[f"entropy/{quadrant}_{fate}"] for quadrant in QUADRANTS)
        assert total == pytest.approx(expected, abs=rounding)
        if fate == "trained":
            assert found["entropy/predicted_change"] == pytest.approx(expected, abs=rounding)
        for quadrant in QUADRANTS:
            expected = math.fsum(part for *of, part, _ in tokens if of == [quadrant, fate])
            # In the bin of the mean, tokens on both sides of it offset each other.
            sign = quadrant.partition("_")[0]
            near = math.fsum(abs(part) for q, f, part, is_near in tokens if is_near and f == fate and sign in q)
            assert found[f"entropy/{quadrant}_{fate}"] == pytest.approx(expected, abs=near + rounding)


def test_metrics_are_means_over_updates_and_an_update_without_tokens_does_not_count():
    updates, rule = (OF_EVERY_KIND[:60], OF_EVERY_KIND[60:], []), EntropyRule()
    for update in updates:
        rule.tally(*as_rule_and_tokens(update))
        rule.close_update()
    one, other = map(metrics_of, updates[:2])
    assert rule.take_metrics() == pytest.approx({name: (one[name] + other[name]) / 2 for name in one})
    assert rule.take_metrics() == {}


def test_a_skipped_update_does_not_count_and_its_tokens_do_not_reach_the_next_one():
    rule = EntropyRule()
    for update, is_skipped in ((OF_EVERY_KIND[:60], True), (OF_EVERY_KIND[60:], False)):
        rule.tally(*as_rule_and_tokens(update))
        rule.close_update(is_skipped)
    assert rule.take_metrics() == metrics_of(OF_EVERY_KIND[60:])


def test_a_tally_is_made_without_reading_a_value_on_the_host():
    meta = [x.to("meta") for x in as_tensors(OF_EVERY_KIND)]  # a meta tensor has no values to read
    tally = tally_entropy(*meta)
    assert tally.shape == tally_entropy(*as_tensors(OF_EVERY_KIND)).shape
    assert entropy_changes(tally + tally).shape == (len(FATES), len(QUADRANTS))


def test_log_probs_that_are_not_finite_make_metrics_nan_and_no_error():
    for log_prob in (math.nan, -math.inf, math.inf):
        changes = entropy_changes(tally_entropy(*as_tensors([(log_prob, 1.0, 1.0, 1.0, 1.0), *OF_EVERY_KIND])))
        assert changes[0].isnan().any()


def test_a_tally_of_log_probs_with_a_gradient_has_no_gradient():
    log_probs = -torch.ones(3, requires_grad=True)
    assert not tally_entropy(log_probs, log_probs.exp(), *torch.ones(3, 3)).requires_grad


def loss_metrics(micro_batches, group=None) -> dict[str, float]:
    loss = BapoPolicyLoss(rule=FixedBounds(0.8, 1.2), group=group)
    for each in micro_batches:
        loss(*each.values())
    loss.entropy_rule.close_update()
    return loss.take_metrics()


def loss_metrics_of_a_rank(rank: int, num_ranks: int, port: int, micro_batches) -> dict[str, float]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    return loss_metrics(micro_batches[rank : rank + 1], dist.group.WORLD)


def test_the_losses_of_a_group_of_ranks_predict_from_the_tokens_of_all(tmp_path):
    micro_batches = presets.make_updates()[0]
    for found in pipeline.run_in_ranks(tmp_path, loss_metrics_of_a_rank, len(micro_batches), micro_batches):
        assert found == pytest.approx(loss_metrics(micro_batches))


# ---- Against softmax policies, whose entropy is known ----

NUM_ACTIONS = 6
numbers = st.lists(st.floats(-3, 3), min_size=NUM_ACTIONS, max_size=NUM_ACTIONS).map(
    lambda values: torch.tensor(values, dtype=torch.float64)
)
kept = st.lists(st.booleans(), min_size=NUM_ACTIONS, max_size=NUM_ACTIONS).map(torch.tensor)


def entropy(logits: torch.Tensor) -> torch.Tensor:
    log_probs = logits.log_softmax(0)
    return -(log_probs.exp() * log_probs).sum()


def entropy_slope(logits: torch.Tensor, step: torch.Tensor) -> float:
    """Return the derivative of the entropy along a step of the logits, by autograd."""
    return float(torch.func.jvp(entropy, (logits,), (step,))[1])


def changes_of(logits: torch.Tensor, behavior: torch.Tensor, advantages: torch.Tensor, weights=1.0) -> torch.Tensor:
    """Return `entropy_changes` with every action as a token, weighted by its probability under the behavior policy.

    `weights`: w of each action, as a multiple of its ratio.
    """
    log_probs, behavior_log_probs = logits.log_softmax(0), behavior.log_softmax(0)
    ratio = (log_probs - behavior_log_probs).exp()
    return entropy_changes(tally_entropy(log_probs, ratio, advantages, weights * ratio, behavior_log_probs.exp()))


@given(numbers, numbers, numbers, kept, st.sampled_from([0.3, 1.0, 2.0]))
def test_the_prediction_is_the_slope_of_the_entropy_along_weighted_advantages_of_the_tokens_trained_on(
    logits, behavior, advantages, kept, weight
):
    trained, left_out = changes_of(logits, behavior, advantages, weight * kept.double()).sum(1).tolist()
    assert trained == pytest.approx(entropy_slope(logits, weight * advantages * kept), abs=1e-9)
    assert left_out == pytest.approx(entropy_slope(logits, advantages * ~kept), abs=1e-9)


# ---- In OpenRLHF's loss and in TRL's: the gradient of a loss says which tokens it trains on, and by how much ----


def change_from_gradients(log_probs, ratio, gradients, weight) -> float:
    """Return the predicted change of a loss that is a mean weighted by `weight`, from its gradient; one shape."""
    mean = (weight * ratio * log_probs).sum() / (weight * ratio).sum()
    return float((gradients * (log_probs - mean)).sum())


@pytest.mark.parametrize("token_level_loss", [True, False], ids=["token mean", "sequence mean"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(clip_config=ClipConfig.preset("readme")),
        dict(clip_config=ClipConfig.preset("readme"), dual_clip=3.0),
        dict(clip_config=ClipConfig.preset("readme"), token_weight="rollout_prob"),
        dict(rule=FixedBounds(0.8, 1.2)),
        dict(rule=FixedBounds(0.8, 4.0), dual_clip=1.1),  # leaves out no positive token above it
        dict(rule=TaperedWeights("sequence"), dual_clip=3.0),
    ],
    ids=["searched", "dual clip", "rollout_prob", "fixed", "dual clip below the bound", "weights"],
)
def test_openrlhfs_loss_predicts_from_the_tokens_that_its_gradient_trains_on(settings, token_level_loss):
    loss = BapoPolicyLoss(token_level_loss=token_level_loss, **settings)
    expected = []
    for each in (micro_batch for update in presets.make_updates() for micro_batch in update):
        log_probs, behavior, advantages, mask = (values.double() for values in each.values())
        mask[:, 0] = 1  # a sequence mean has no empty response
        loss(log_probs.requires_grad_(), behavior, advantages, mask)[0].backward()
        loss.entropy_rule.close_update()
        ratio = importance_ratio(log_probs.detach(), behavior)
        weight = mask if token_level_loss else mask / mask.sum(-1, keepdim=True)
        expected.append(change_from_gradients(log_probs.detach(), ratio, log_probs.grad, weight))
    metrics = loss.take_metrics()
    assert metrics["entropy/predicted_change"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    left_out = {name: value for name, value in metrics.items() if "left_out" in name}
    assert any(left_out.values()) == (type(loss.rule).weights is ClipRule.weights)  # weights of 0 are rare


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("entropy_rule"))


@pytest.mark.parametrize("preset", ["readme", "steady"])
def test_trls_loss_predicts_once_for_each_optimizer_step_from_the_tokens_that_its_gradient_trains_on(
    preset, directory, monkeypatch
):
    overrides = dict(per_device_train_batch_size=8, gradient_accumulation_steps=2, steps_per_generation=2)
    trainer = BapoGRPOTrainer(**arguments(directory, **overrides), bapo=preset)
    gradients = [gradient for _, _, gradient in in_trl(trainer, monkeypatch)]
    expected = []
    for number, update in enumerate(presets.make_updates()):
        columns = []
        for each, gradient in zip(update, gradients[presets.NUM_MICRO_BATCHES * number :], strict=False):
            ratio = importance_ratio(each["log_probs"], each["old_log_probs"])
            # TRL divides each micro-batch by its own number of tokens here, which `in_trl` gives it.
            columns.append((each["log_probs"], ratio, gradient * each["mask"].sum(), each["mask"]))
        log_probs, ratio, gradient, mask = (torch.cat(column).double() for column in zip(*columns, strict=True))
        expected.append(change_from_gradients(log_probs, ratio, gradient / mask.sum(), mask))
    assert trainer._metrics["train"]["entropy/predicted_change"] == pytest.approx(expected, rel=1e-4)
