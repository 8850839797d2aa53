"""Stale samples in OpenRLHF's real policy actor: ratios, metrics, steps, and the search's reaction."""

import math
from argparse import Namespace
from dataclasses import fields

import pipeline
import pytest
import torch

from openrlhf_bapo.adapter.trainer import _with_replayed_steps

LENGTHS = [3, 5, 2, 7, 1, 4, 6, 2]
POSITIVE = [True, False] * 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return pipeline.make_model(tmp_path_factory.mktemp("actors"))


def one_update(directory, staleness: list[int], log_ratios: list[float], **flags) -> dict:
    """One optimizer step over eight samples, the first of its training step."""
    samples = pipeline.make_experience(LENGTHS, positive=POSITIVE)
    for sample, stale, log_ratio in zip(samples, staleness, log_ratios, strict=True):
        sample.staleness = stale * sample.action_mask
        sample.info["log_ratio"] = torch.tensor([log_ratio])
    argv = pipeline.flags(
        directory,
        policy_loss="bapo",
        train__batch_size=8,
        train__micro_batch_size=2,
        rollout__batch_size=2,
        rollout__micro_batch_size=1,
        replay__ratio=1,
        **flags,
    )
    (result,) = pipeline.train_policy_actors(directory, argv, [samples])
    return result


STALENESS = [0, 0, 1, 2, 3, 4, 7, 9]
LOG_RATIOS = [0, 0, 0.1, -0.2, 0.3, -0.4, 0.7, -0.9]
BUCKETS = {"0": [0, 1], "1": [2], "2-3": [3, 4], "4-7": [5, 6], "8+": [7]}


@pytest.fixture(scope="module")
def stale_update(directory):
    return one_update(directory, STALENESS, LOG_RATIOS)


def test_the_ratios_of_the_first_optimizer_step_are_those_that_the_kept_log_probs_imply(stale_update):
    status = stale_update["status"]
    for label, rows in BUCKETS.items():
        ratios = [math.exp(LOG_RATIOS[row]) for row in rows for _ in range(LENGTHS[row])]
        n, total, squares = len(ratios), sum(ratios), sum(r * r for r in ratios)
        expected = {"ratio_mean": total / n, "ratio_max": max(ratios), "ess": total**2 / (n * squares)}
        expected["token_frac"] = n / sum(LENGTHS)
        for name, value in expected.items():
            assert status[f"offpolicy/{name}/staleness_{label}"] == pytest.approx(value, rel=1e-4), (name, label)
    tokens = [stale for stale, length in zip(STALENESS, LENGTHS, strict=True) for _ in range(length)]
    assert status["offpolicy/staleness_mean"] == pytest.approx(sum(tokens) / len(tokens))
    assert status["offpolicy/staleness_max"] == 9


def test_the_search_reacts_to_the_stale_tokens_ratios(directory, stale_update):
    fresh = one_update(directory, [0] * 8, [0.0] * 8)
    assert fresh["status"]["offpolicy/ess"] == pytest.approx(1, abs=1e-5)
    assert fresh["status"]["bapo/initial_share"] != pytest.approx(
        stale_update["status"]["bapo/initial_share"], abs=0.01
    )


def test_replayed_samples_make_optimizer_steps_of_their_own_under_dynamic_batch(directory):
    samples = pipeline.make_experience(LENGTHS * 2, positive=POSITIVE * 2)
    flags = dict(
        policy_loss="bapo",
        train__batch_size=8,
        rollout__batch_size=2,
        rollout__micro_batch_size=1,
        train__dynamic_batch_enable=True,
        train__max_tokens_per_gpu=26,
    )
    (fresh_only,) = pipeline.train_policy_actors(directory, pipeline.flags(directory, **flags), [samples])
    assert len(fresh_only["bounds"]) == 1  # OpenRLHF's cap: 2 prompts x 4 samples // 8
    (replayed,) = pipeline.train_policy_actors(
        directory, pipeline.flags(directory, **flags, replay__ratio=1), [samples]
    )
    assert len(replayed["bounds"]) == 2


def test_a_replayed_sample_comes_back_as_it_was_made_but_for_its_staleness():
    from openrlhf_bapo.adapter.experience_maker import OffPolicyExperienceMaker, _to_group

    made = pipeline.make_experience([3, 5], seed=1)
    for sample in made:
        step = torch.rand(sample.action_mask.shape)
        sample.action_log_probs, sample.rollout_log_probs = -step, -step - 0.1
        sample.base_action_log_probs, sample.values = -step - 0.2, step + 1  # KL as a loss, and GAE
        sample.versions = 5 * sample.action_mask.int()
        sample.rewards = sample.scores = sample.info["reward"]
        sample.truncated = torch.tensor([False])
    made = [sample for batch in made for sample in split(batch)]
    maker = object.__new__(OffPolicyExperienceMaker)
    maker.policy_version = 8
    back = [maker._from_pool(sample) for sample in _to_group(made, 5).samples]
    for before, after in zip(made, back, strict=True):
        assert torch.equal(after.staleness, 3 * before.action_mask)
        for field in fields(before):
            value = getattr(before, field.name)
            if isinstance(value, torch.Tensor) and field.name != "staleness":
                assert torch.equal(getattr(after, field.name), value), field.name
        assert after.info.keys() == before.info.keys()


def split(batch):
    from openrlhf.trainer.ppo_utils.experience import remove_padding_in_sequences, split_experience_batch

    return remove_padding_in_sequences(split_experience_batch(batch))


def test_the_learning_rate_schedule_has_room_for_replayed_steps():
    args = Namespace(replay=Namespace(ratio=0.5))
    prepare = _with_replayed_steps(lambda strategy, tokenizer: ("prompts", "evaluation", 100))
    assert prepare(Namespace(args=args), None) == ("prompts", "evaluation", 150)


def test_the_schedule_is_lengthened_once_for_sync_and_async_training():
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async

    assert ppo_trainer_async.prepare_datasets is ppo_trainer.prepare_datasets
    assert not hasattr(ppo_trainer.prepare_datasets.__wrapped__, "__wrapped__")


def test_a_loss_that_is_not_finite_ends_the_run(directory):
    with pytest.raises(AssertionError, match="RuntimeError: policy_loss is nan: .* --ckpt.load_enable"):
        one_update(directory, [0] * 8, [0.0] * 7 + [math.nan])
