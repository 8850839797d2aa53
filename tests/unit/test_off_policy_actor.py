"""Stale samples in OpenRLHF's real policy actor: ratios, metrics, steps, and the search's reaction."""

import math
from argparse import Namespace

import pipeline
import pytest
import torch
from openrlhf.trainer import ppo_trainer, ppo_trainer_async
from openrlhf.trainer.ray import ppo_actor, ppo_critic
from reference import contributions, search
from transformers import AutoModelForCausalLM

from openrlhf_bapo import ClipConfig
from openrlhf_bapo.openrlhf.trainer import _seed_the_order_and_plan_replayed_steps

LENGTHS = [3, 5, 2, 7, 1, 4, 6, 2]
POSITIVE = [True, False] * 4
SIZES = dict(train__batch_size=8, train__micro_batch_size=2, rollout__batch_size=2, rollout__micro_batch_size=1)
STALENESS = [0, 0, 1, 2, 3, 4, 7, 9]
LOG_RATIOS = [0, 0, 0.1, -0.2, 0.3, -0.4, 0.7, -0.9]
BUCKETS = {"0": [0, 1], "1": [2], "2-3": [3, 4], "4-7": [5, 6], "8+": [7]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("actors"))


def stale_samples(staleness: list[int], log_ratios: list[float], log_weights: list[float] | None = None) -> list:
    samples = pipeline.make_experience(LENGTHS, positive=POSITIVE)
    for i, sample in enumerate(samples):
        sample.staleness = staleness[i] * sample.action_mask
        sample.info["log_ratio"] = torch.tensor([log_ratios[i]])
        if log_weights:
            sample.info["log_weight"] = torch.tensor([log_weights[i]])
    return samples


def one_update(
    directory, staleness=STALENESS, log_ratios=LOG_RATIOS, log_weights=None, num_ranks=1, num_steps=1, **flags
) -> list[dict]:
    """One optimizer step over eight samples, the first of its training step; what each rank says."""
    settings = SIZES | dict(policy_loss="bapo", actor__num_gpus_per_node=num_ranks, replay__ratio=1)
    samples = stale_samples(staleness, log_ratios, log_weights)
    size = len(samples) // num_ranks
    by_rank = [samples[start : start + size] for start in range(0, len(samples), size)]
    argv = pipeline.flags(directory, **settings | flags)
    return pipeline.train_policy_actors(directory, argv, by_rank, num_steps=num_steps)


def tokens(log_ratios=LOG_RATIOS, weights=None) -> list[tuple[float, float, float]]:
    """(ratio, advantage, weight) of every token of the eight samples; `weights` a list a sample, or 1."""
    samples = stale_samples([0] * 8, log_ratios)
    weights = [[1.0] * length for length in LENGTHS] if weights is None else weights
    return [
        (math.exp(log_ratio), float(sample.advantages.sum()) / length, weight)
        for sample, log_ratio, length, some in zip(samples, log_ratios, LENGTHS, weights, strict=True)
        for weight in some
    ]


def share(token_list, lower=0.6, upper=1.2, contribution="surrogate") -> float:
    positive, negative = contributions(token_list, lower, upper, contribution)
    return positive / (positive + negative)


@pytest.fixture(scope="module")
def stale_update(directory):
    (result,) = one_update(directory)
    return result


def test_the_ratios_of_the_first_optimizer_step_are_those_that_the_kept_log_probs_imply(stale_update):
    status = stale_update["status"]
    for label, rows in BUCKETS.items():
        ratios = [math.exp(LOG_RATIOS[row]) for row in rows for _ in range(LENGTHS[row])]
        n, total, squares = len(ratios), sum(ratios), sum(r * r for r in ratios)
        expected = {"ratio_mean": total / n, "ratio_max": max(ratios), "ess": total**2 / (n * squares)}
        expected["token_frac"] = n / sum(LENGTHS)
        for name, value in expected.items():
            assert status[f"offpolicy/{name}/staleness_{label}"] == pytest.approx(value, rel=1e-4), (name, label)
    ages = [stale for stale, length in zip(STALENESS, LENGTHS, strict=True) for _ in range(length)]
    assert status["offpolicy/staleness_mean"] == pytest.approx(sum(ages) / len(ages))
    assert status["offpolicy/staleness_max"] == 9


def test_the_search_takes_the_stale_tokens_ratios_and_ends_where_the_plain_loop_does(stale_update):
    (found,) = stale_update["searches"]
    expected = search(tokens(), ClipConfig())
    for name, tolerance in dict(lower=0, upper=0, reached=0, initial_share=1e-4, positive_share=1e-4).items():
        assert found[name] == pytest.approx(float(expected[name]), rel=tolerance, abs=0), name
    assert expected["initial_share"] != pytest.approx(share(tokens([0.0] * 8)), abs=0.01)  # that of ratios of 1


@pytest.mark.parametrize(
    ("flags", "num_forwards"),
    [
        (dict(replay__ratio=1, train__async_enable=True), 4),
        (dict(replay__ratio=None, offpolicy__ratio_base="rollout"), 0),
        (dict(replay__ratio=None, train__async_enable=True), 0),
        (dict(replay__ratio=None, partial__token_budget=8, data__max_len=64), 0),
    ],
    ids=str,
)
def test_the_first_update_searches_in_stale_ratios_and_runs_what_openrlhf_has_not_just_run(
    directory, flags, num_forwards
):
    (result,) = one_update(directory, **flags)
    assert result["searches"][0]["initial_share"] == pytest.approx(share(tokens()), rel=1e-4)
    assert result["status"]["timing/bapo_ratio_forward"] == num_forwards


def test_log_probs_are_of_the_distribution_that_is_sampled_from_at_rollout_temperature(directory, stale_update):
    (result,) = one_update(directory, rollout__temperature=0.6)
    model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32).eval()
    for sample, log_ratio, found in zip(
        stale_samples(STALENESS, LOG_RATIOS), LOG_RATIOS, result["behavior_log_probs"], strict=True
    ):
        with torch.no_grad():
            log_probs = (model(sample.sequences).logits[:, :-1] / 0.6).log_softmax(-1)
        expected = log_probs.gather(-1, sample.sequences[:, 1:, None]).squeeze(-1) - log_ratio
        torch.testing.assert_close(found, expected * sample.action_mask, rtol=0, atol=1e-4)
    # The window's own forward and the loss divide the logits as well, so that the ratios stay as they were made.
    assert result["status"]["timing/bapo_ratio_forward"] == 4
    assert result["searches"][0]["initial_share"] == pytest.approx(share(tokens()), rel=1e-4)
    for label in ("0", "1", "2-3", "4-7", "8+"):
        name = f"offpolicy/ratio_mean/staleness_{label}"
        assert result["status"][name] == pytest.approx(stale_update["status"][name], rel=1e-4)


def assert_clipped(status: dict, **rows: tuple[int, ...]) -> None:
    """Assert that the fractions by the sign of the advantage are those of the tokens of these samples."""
    for sign, beyond in rows.items():
        num_tokens = sum(LENGTHS[row] for row in range(8) if POSITIVE[row] == (sign == "positive"))
        for area in ("bapo", "offpolicy"):
            expected = sum(LENGTHS[row] for row in beyond) / num_tokens
            assert status[f"{area}/clip_frac_{sign}"] == pytest.approx(expected), (area, sign)


def test_the_clip_fractions_count_the_tokens_beyond_the_updates_own_bounds(directory):
    # Bounds that do not move, so that they lie between the ratios: 0.41, 0.67 | 0.82, 1, and 1, 1.11, 1.35 | 2.01.
    fixed = dict(bapo__ratio_lower_start=0.7, bapo__ratio_lower_max=0.7)
    fixed |= dict(bapo__ratio_upper_start=1.5, bapo__ratio_upper_max=1.5)
    (result,) = one_update(directory, **fixed)
    assert_clipped(result["status"], positive=(6,), negative=(5, 7))
    for label, expected_above, expected_below in (("0", 0, 0), ("2-3", 0, 0), ("4-7", 1, 1), ("8+", 0, 1)):
        assert result["status"][f"offpolicy/clip_frac_positive/staleness_{label}"] == expected_above, label
        assert result["status"][f"offpolicy/clip_frac_negative/staleness_{label}"] == expected_below, label


LOG_WEIGHTS = [0, 0.1, -0.3, 0.9, -0.2, 1.3, 0.05, -0.4]  # by sample, how far the policy had moved from the engine's
UNSEEN = dict(policy_loss="ppo", offpolicy__ratio_base="recomputed", offpolicy__lag=1, replay__ratio=None)


def assert_ratios_are_measured_against_the_engines_policy(status: dict) -> None:
    for label, rows in BUCKETS.items():
        ratios = [math.exp(LOG_RATIOS[row] + LOG_WEIGHTS[row]) for row in rows for _ in range(LENGTHS[row])]
        assert status[f"offpolicy/ratio_mean/staleness_{label}"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)


def test_a_ratio_that_does_not_see_staleness_is_clipped_as_it_is_and_measured_against_the_behavior_policy(directory):
    (result,) = one_update(directory, log_weights=LOG_WEIGHTS, **UNSEEN)
    status = result["status"]
    assert_ratios_are_measured_against_the_engines_policy(status)
    assert_clipped(status, positive=(4, 6), negative=(5, 7))  # to [0.8, 1.2]


def test_a_ratio_that_sees_staleness_is_measured_as_it_is_even_if_the_engine_gives_log_probs_too(
    directory, stale_update
):
    (result,) = one_update(directory, log_weights=LOG_WEIGHTS)
    expected = {name: value for name, value in stale_update["status"].items() if name.startswith("offpolicy/")}
    assert {name: result["status"][name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_a_token_without_a_finite_log_prob_of_the_engine_is_left_out_where_metrics_are_against_it(directory):
    log_weights = [math.nan, *LOG_WEIGHTS[1:]]
    (result,) = one_update(directory, log_weights=log_weights, **UNSEEN)
    assert result["status"]["offpolicy/nonfinite_tokens"] == LENGTHS[0]
    assert 0 < result["status"]["offpolicy/ratio_mean"] < 10


@pytest.mark.parametrize("size", [2, 8], ids=["the ratios of a window's forward", "the ratios of the loss"])
def test_decoupled_searches_in_ratios_since_the_steps_start_and_weighs_tokens_by_what_came_before(directory, size):
    flags = dict(offpolicy__objective="decoupled", train__micro_batch_size=size)
    (result,) = one_update(directory, log_weights=LOG_WEIGHTS, **flags)
    capped = [[min(math.exp(w), 2)] * length for w, length in zip(LOG_WEIGHTS, LENGTHS, strict=True)]
    (found,) = result["searches"]
    assert found["initial_share"] == pytest.approx(share(tokens(weights=capped)), rel=1e-4)
    assert found["initial_share"] != pytest.approx(share(tokens()), rel=1e-2)
    assert_ratios_are_measured_against_the_engines_policy(result["status"])
    if size == 8:
        num_capped = sum(length for w, length in zip(LOG_WEIGHTS, LENGTHS, strict=True) if math.exp(w) > 2)
        assert result["status"]["is_filter_ratio"] == pytest.approx(num_capped / sum(LENGTHS)) != 0


def test_the_predicted_change_of_entropy_is_that_of_the_tokens_trained_on(stale_update):
    log_probs = torch.cat([x[x != 0] for x in stale_update["behavior_log_probs"]]).double()
    ratio, advantages, _ = torch.tensor(tokens(), dtype=torch.float64).unbind(1)
    log_probs = log_probs + ratio.log()
    (found,), status = stale_update["searches"], stale_update["status"]
    inside = torch.where(advantages > 0, ratio <= found["upper"] + 1e-6, ratio >= found["lower"] - 1e-6)
    changes = -ratio * advantages * (log_probs - (ratio * log_probs).sum() / ratio.sum()) / len(ratio)
    assert status["entropy/predicted_change"] == pytest.approx(float(changes[inside].sum()), rel=1e-4)
    left_out = sum(value for name, value in status.items() if name.startswith("entropy/") and "left_out" in name)
    assert left_out == pytest.approx(float(changes[~inside].sum()), rel=1e-4) and left_out


def test_two_ranks_report_the_metrics_of_all_tokens(directory, stale_update):
    # Rank 0 has the four freshest samples, rank 1 the oldest: their own tallies have no bucket above 1 in common.
    expected = {k: v for k, v in stale_update["status"].items() if k.startswith(("bapo/", "entropy/", "offpolicy/"))}
    assert len(expected) > 40
    for result in one_update(directory, num_ranks=2):
        assert {name: result["status"][name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_a_training_step_reports_its_own_tokens(directory):
    (result,) = one_update(directory, num_steps=2)
    stale, fresh = result["statuses"]
    assert stale["offpolicy/ratio_max"] == pytest.approx(math.exp(0.7), rel=1e-4)
    assert fresh["offpolicy/ratio_max"] == pytest.approx(1, abs=1e-4)


def test_log_ratios_beyond_20_count_as_20(directory):
    log_ratios = [0, 0, 0, 25.0, 25.0, 0, 0, -25.0]
    (result,) = one_update(directory, log_ratios=log_ratios)
    status = result["status"]
    assert status["offpolicy/ratio_max/staleness_2-3"] == pytest.approx(math.exp(20), rel=1e-6)
    assert status["offpolicy/ratio_mean/staleness_8+"] == pytest.approx(math.exp(-20), rel=1e-6)
    assert status["offpolicy/ratio_max"] == pytest.approx(math.exp(20), rel=1e-6)
    clamped = tokens([max(-20, min(20, log_ratio)) for log_ratio in log_ratios])
    assert result["searches"][0]["initial_share"] == pytest.approx(share(clamped), rel=1e-4)


def test_the_share_weighs_tokens_as_the_losss_aggregation_and_the_flag_say(directory):
    per_sequence = [[1 / length] * length for length in LENGTHS]
    (result,) = one_update(directory, actor__loss_agg_mode="seq-mean-token-mean")
    found = result["searches"][0]["initial_share"]
    assert found == pytest.approx(share(tokens(weights=per_sequence)), rel=1e-4)
    assert found != pytest.approx(share(tokens()), rel=1e-2)

    (result,) = one_update(directory, bapo__token_weight="rollout_prob")
    probabilities = [
        log_probs[0, -length:].exp().tolist()
        for log_probs, length in zip(result["behavior_log_probs"], LENGTHS, strict=True)
    ]
    found = result["searches"][0]["initial_share"]
    assert found == pytest.approx(share(tokens(weights=probabilities)), rel=1e-4)
    assert found != pytest.approx(share(tokens()), rel=1e-2)

    decoupled = dict(offpolicy__objective="decoupled", offpolicy__weight="none", bapo__token_weight="rollout_prob")
    (result,) = one_update(directory, log_weights=LOG_WEIGHTS, **decoupled)
    of_engine = [[p / math.exp(w) for p in row] for row, w in zip(probabilities, LOG_WEIGHTS, strict=True)]
    assert result["searches"][0]["initial_share"] == pytest.approx(share(tokens(weights=of_engine)), rel=1e-4)


@pytest.mark.parametrize(
    ("given", "areas"),
    [
        (dict(policy_loss="gspo", replay__ratio=None), []),
        (dict(policy_loss="ppo", replay__ratio=None), ["bapo", "entropy"]),
        (dict(policy_loss="ppo"), ["bapo", "entropy", "offpolicy"]),
    ],
    ids=str,
)
def test_a_loss_without_token_ratios_logs_no_share_and_a_run_without_off_policy_features_no_staleness(
    directory, given, areas
):
    (result,) = one_update(directory, [0] * 8, [0.0] * 8, **given)
    assert sorted({name.split("/")[0] for name in result["status"] if "/" in name}) == areas


def test_replayed_samples_make_optimizer_steps_of_their_own_under_dynamic_batch(directory):
    samples = pipeline.make_experience(LENGTHS * 2, positive=POSITIVE * 2)
    flags = SIZES | dict(policy_loss="bapo", train__dynamic_batch_enable=True, train__max_tokens_per_gpu=26)
    (fresh_only,) = pipeline.train_policy_actors(directory, pipeline.flags(directory, **flags), [samples])
    assert len(fresh_only["bounds"]) == 1  # OpenRLHF's cap: 2 prompts x 4 samples // 8
    argv = pipeline.flags(directory, **flags, replay__ratio=1)
    (replayed,) = pipeline.train_policy_actors(directory, argv, [samples])
    assert len(replayed["bounds"]) == 2
    assert replayed["args"].rollout.batch_size == 2  # lifted for the planning alone


def test_the_learning_rate_schedule_has_room_for_replayed_steps():
    args = Namespace(replay=Namespace(ratio=0.5), train=Namespace(seed=0))
    prompts = Namespace(sampler=Namespace(generator=torch.Generator()), dataset=Namespace(prompts=[], labels=[]))
    prompts.state_dict = prompts.load_state_dict = None  # not called here
    ppo_trainer = Namespace(prepare_datasets=lambda strategy, tokenizer: (prompts, "evaluation", 100))
    _seed_the_order_and_plan_replayed_steps(ppo_trainer)
    assert ppo_trainer.prepare_datasets(Namespace(args=args), None) == (prompts, "evaluation", 150)


def test_steps_are_planned_once_and_alike_for_actor_and_critic_and_for_sync_and_async_training():
    assert ppo_critic.NaiveReplayBuffer is ppo_actor.NaiveReplayBuffer
    assert ppo_trainer_async.prepare_datasets is ppo_trainer.prepare_datasets
    for planning in (ppo_critic.NaiveReplayBuffer.setup_dynamic_batch, ppo_trainer.prepare_datasets):
        assert not hasattr(planning.__wrapped__, "__wrapped__")
