"""--bapo.smoothing on OpenRLHF's policy actor, float32: bounds that follow the updates before, without a forward."""

import pipeline
import pytest
import reference
from test_baselines import samples_with_both_signs, share, tokens, train_steps
from test_update_scope import GRADIENT, NUM_UPDATES, SAMPLES, flags, same_updates

from openrlhf_bapo import ClipConfig

SMOOTHING = dict(bapo__smoothing=1.5)
KEEP = 2 ** (-1 / 1.5)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("actors"))


@pytest.fixture(scope="module")
def one_micro_batch(directory):
    return pipeline.train_policy_actors(directory, flags(directory, **GRADIENT, **SMOOTHING), [SAMPLES])[0]


def test_every_update_is_trained_between_bounds_that_follow_the_searches_of_those_before(directory):
    # At a learning rate of 0 every ratio is known, and every search finds the same.
    config = ClipConfig(contribution="gradient", positive_contribution_target=0.5)
    settings = dict(policy_loss="bapo", bapo__contribution="gradient", bapo__positive_contribution_target=0.5)
    settings |= dict(train__max_epochs=3, **SMOOTHING)
    samples = samples_with_both_signs()
    everything = tokens(samples)
    found = reference.search(everything, config)
    statuses = train_steps(directory, [samples], 2, **settings)
    lower, upper = 0.75, 2.1
    used = []
    for _ in range(3):
        used.append((lower, upper))
        lower, upper = (
            KEEP * old + (1 - KEEP) * new for old, new in ((lower, found["lower"]), (upper, found["upper"]))
        )
    assert max(abs(upper - found["upper"]) for _, upper in used) > 0.1  # there was something to follow
    for name, values in {
        "bapo/clip_low": [lower for lower, _ in used],
        "bapo/clip_high": [upper for _, upper in used],
        "bapo/positive_share": [share(everything, *bounds, "gradient") for bounds in used],
        "bapo/surrogate_share": [share(everything, *bounds, "surrogate") for bounds in used],
        "bapo/target_reached": [share(everything, *bounds, "gradient") >= 0.5 for bounds in used],
        "bapo/initial_share": [found["initial_share"]],
        "bapo/found_low": [found["lower"]],
        "bapo/found_high": [found["upper"]],
        "bapo/found_share": [found["positive_share"]],
        "bapo/found_distance": [abs(low - found["lower"]) + abs(high - found["upper"]) for low, high in used],
    }.items():
        assert statuses[0][name] == pytest.approx(sum(values) / len(values), rel=1e-5), name
    # The second training step goes on where the first ended. Its samples are fresh: its search finds other bounds.
    fresh = reference.search(tokens(samples, [0.0] * len(samples)), config)
    following = []
    for _ in range(3):
        following.append(upper)
        upper = KEEP * upper + (1 - KEEP) * fresh["upper"]
    assert statuses[1]["bapo/clip_high"] == pytest.approx(sum(following) / 3, rel=1e-5)


def test_no_update_takes_a_forward_of_its_own_and_all_its_micro_batches_have_the_same_bounds(
    directory, one_micro_batch
):
    split = flags(directory, **GRADIENT, **SMOOTHING, train__micro_batch_size=2)
    (result,) = pipeline.train_policy_actors(directory, split, [SAMPLES], num_steps=2)
    assert [status["timing/bapo_ratio_forward"] for status in result["statuses"]] == [0, 0]
    assert [status["timing/bapo_search"] for status in result["statuses"]] == [(4 + 1) * NUM_UPDATES] * 2
    assert result["searches"] == []  # nor a search before an update
    clamped = result["clamped"]
    assert len(clamped) == 2 * 4 * NUM_UPDATES
    updates = clamped[::4]
    assert [bounds for bounds in updates for _ in range(4)] == clamped
    assert updates[0] == (0.75, pytest.approx(2.1)) and len(set(updates)) == 2 * NUM_UPDATES
    assert updates[:NUM_UPDATES] == one_micro_batch["clamped"]


@pytest.mark.parametrize(
    "split",
    [
        dict(actor__num_gpus_per_node=2, train__micro_batch_size=2),
        dict(train__dynamic_batch_enable=True, train__max_tokens_per_gpu=26, ds__zero_stage=2),
    ],
    ids=["two ranks", "dynamic batch"],
)
def test_however_an_update_is_split_it_is_the_update_of_one_micro_batch(directory, one_micro_batch, split):
    by_rank = [SAMPLES[:4], SAMPLES[4:]] if "actor__num_gpus_per_node" in split else [SAMPLES]
    ranks = pipeline.train_policy_actors(directory, flags(directory, **GRADIENT, **SMOOTHING, **split), by_rank)
    for result in ranks:
        assert list(dict.fromkeys(result["clamped"])) == one_micro_batch["clamped"]  # to the last bit
        same_updates(result, one_micro_batch | {"bounds": []})
        metrics = {name: value for name, value in one_micro_batch["status"].items() if name.startswith("bapo/")}
        assert {name: result["status"][name] for name in metrics} == pytest.approx(metrics, rel=1e-3)
