"""From generated samples to training batches: the ratio's denominators, staleness, and replayed groups.

OpenRLHF's RemoteExperienceMaker is real and gets samples from our SamplesGenerator. Everything runs in this process
without Ray, and `recomputed` stands for the actor's forward pass.
"""

import importlib
import shutil
from argparse import Namespace
from dataclasses import fields

import pipeline
import pytest
import torch
from openrlhf.trainer.ppo_utils import experience_maker
from openrlhf.trainer.ppo_utils.experience import remove_padding_in_sequences, split_experience_batch
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker as Upstream
from openrlhf.trainer.ppo_utils.kl_controller import FixedKLController

from openrlhf_bapo.openrlhf.experience_maker import OffPolicyExperienceMaker
from openrlhf_bapo.openrlhf.partial_rollouts import RolloutSamples
from openrlhf_bapo.openrlhf.replay_checkpoint import (
    _replay_fingerprint,
    load_saved_pool,
    remove_pruned,
    save_pools,
    use_checkpoint,
)


def recomputed(sequences: torch.Tensor, action_mask: torch.Tensor, **_) -> torch.Tensor:
    """The actor's log-probs, [batch, actions]: a function of the token, so that tests can compute them."""
    return -sequences[:, 1:].float() / 100


class Actors:
    """Stands for RayActorGroup: calls `recomputed` on every batch, and adds `shift`."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift

    def async_run_method_batch(self, method_name: str, **batches) -> list:
        names, columns = zip(*batches.items(), strict=True)
        rows = (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))
        return [[recomputed(**row) + self.shift for row in rows]]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    monkeypatch.setattr(experience_maker, "ray", Namespace(get=lambda refs: refs, put=lambda value: value))


NUM_SAMPLES = 4


def make_maker(directory, **flags):
    """Build our experience maker as OpenRLHF's trainer does: 4 prompts x 4 samples, optimizer steps of 8 samples."""
    settings = dict(
        policy_loss="bapo",
        reward__remote_url="http://verifier/get_reward",
        rollout__batch_size=4,
        rollout__n_samples_per_prompt=NUM_SAMPLES,
        rollout__micro_batch_size=3,  # batches cut through the groups
        train__batch_size=8,
        train__micro_batch_size=2,
    )
    args = pipeline.parse(pipeline.flags(directory, **settings | flags))
    strategy, tokenizer = Namespace(args=args), Namespace(pad_token_id=pipeline.PAD)
    return OffPolicyExperienceMaker(Actors(), None, None, None, FixedKLController(0), strategy, tokenizer)


def publish(maker, version: int) -> None:
    """Train and publish until `version`: one optimizer step before version 1, two before version 2, and so on."""
    while maker.policy_version < version:
        maker.num_optimizer_steps += maker.policy_version + 1
        maker.count_version()


def generated(maker, responses: list[dict]) -> list:
    generator = pipeline.samples_generator(maker.args)
    return [generator._process_response_into_experience(response, max_len=64) for response in responses]


def rollout(maker, num_prompts: int = 4, version: int = 0, log_prob: float = -0.5) -> list:
    """A whole rollout. Each group has lengths 1 to 4 and rewards 0 to 3, and the number of its prompt as the label."""
    return [
        sample
        for prompt in range(num_prompts)
        for sample in generated(
            maker,
            [
                pipeline.response(length, float(length - 1), version, log_prob) | {"label": str(prompt)}
                for length in range(1, NUM_SAMPLES + 1)
            ],
        )
    ]


def joined(batches) -> list:
    """The samples of every batch, without padding."""
    return [sample for batch in batches for sample in remove_padding_in_sequences(split_experience_batch(batch))]


def tokens_of(experience, name: str) -> list[float]:
    """The values of a field at the action tokens."""
    return getattr(experience, name)[experience.action_mask > 0].tolist()


# ---- denominators and staleness ----


def experience_of(maker, responses: list[dict]):
    return maker.make_experience(maker.split_rollout_samples(generated(maker, responses)))[0]


RESPONSES = [
    pipeline.response(3, version=[2, 3, 3], log_prob=-0.5),
    pipeline.response(1, version=3, log_prob=-0.3),
    pipeline.response(2, version=1, log_prob=-0.2),
]
STALENESS = [1, 0, 0, 0, 2, 2]  # at version 3
ACTOR = [-0.06, -0.07, -0.08, -0.06, -0.06, -0.07]
ENGINE = [-0.5] * 3 + [-0.3] + [-0.2] * 2
STALE_FROM_ENGINE = [-0.5, -0.07, -0.08, -0.06, -0.2, -0.2]
STALE = [dict(train__async_enable=True), dict(offpolicy__lag=2), dict(partial__token_budget=9)]
DECOUPLED = dict(offpolicy__objective="decoupled")
TAPERED = DECOUPLED | dict(offpolicy__weight="tapered")


def test_staleness_counts_versions_and_optimizer_steps_the_actors_steps_from_generation_to_training(tmp_path):
    maker = make_maker(tmp_path)
    publish(maker, 13)
    maker.version_offset = 10  # a resumed run, whose engines count from 0 again
    experience = experience_of(maker, RESPONSES)
    assert tokens_of(experience, "versions") == [12, 13, 13, 13, 11, 11]
    assert tokens_of(experience, "staleness") == [1, 0, 0, 0, 2, 2]
    assert tokens_of(experience, "optimizer_steps") == [13, 0, 0, 0, 12 + 13, 12 + 13]
    elsewhere = experience.action_mask == 0
    for name in ("versions", "staleness", "optimizer_steps"):
        assert not getattr(experience, name)[elsewhere].any()
    maker.metrics()
    maker.count_version()  # the critic alone was trained
    experience = experience_of(maker, RESPONSES)
    assert tokens_of(experience, "staleness") == [2, 1, 1, 1, 3, 3]
    assert tokens_of(experience, "optimizer_steps") == [13, 0, 0, 0, 12 + 13, 12 + 13]
    assert "offpolicy/engine_mismatch" not in maker.metrics()  # without fresh tokens


@pytest.mark.parametrize(
    ("flags", "denominators", "behavior"),
    [
        (dict(), ACTOR, ENGINE),
        (dict(offpolicy__ratio_base="rollout"), ENGINE, ENGINE),
        (STALE[2], STALE_FROM_ENGINE, ENGINE),
        *((dict(policy_loss="ppo", offpolicy__ratio_base="recomputed") | stale, ACTOR, ENGINE) for stale in STALE),
        *((DECOUPLED | stale, ACTOR, ENGINE) for stale in [{}, *STALE]),
        *((TAPERED | stale, ACTOR, STALE_FROM_ENGINE) for stale in [{}, *STALE]),
    ],
    ids=str,
)
def test_each_token_has_the_denominator_and_the_behavior_log_prob_of_the_flags(tmp_path, flags, denominators, behavior):
    maker = make_maker(tmp_path, **flags)
    publish(maker, 3)
    experience = experience_of(maker, RESPONSES)
    assert tokens_of(experience, "staleness") == STALENESS
    assert tokens_of(experience, "action_log_probs") == pytest.approx(denominators)
    assert tokens_of(experience, "rollout_log_probs") == pytest.approx(behavior)
    assert tokens_of(experience, "start_log_probs") == pytest.approx(ACTOR)
    if denominators is ENGINE:
        assert not experience.action_log_probs[experience.action_mask == 0].any()
    gaps = [actor - engine for actor, engine, age in zip(ACTOR, ENGINE, STALENESS, strict=True) if not age]
    mixed = {"offpolicy/mixed_versions": pytest.approx(1 / 3)}  # the first response alone has two
    assert maker.metrics() == mixed | {"offpolicy/engine_mismatch": pytest.approx(sum(gaps) / 3)}
    assert maker.metrics() == {}


def test_a_rollouts_metrics_are_logged_once_and_its_unfinished_responses_are_kept_for_the_checkpoint(tmp_path):
    maker = make_maker(tmp_path, partial__token_budget=9)
    unfinished = object()
    samples = generated(maker, [pipeline.response(2, float(n % 2), log_prob=-0.5) for n in range(16)])
    maker.make_experience_batch(RolloutSamples(samples, {"partial/taken": 4.0}, unfinished))
    assert maker.unfinished is unfinished
    assert maker.metrics()["partial/taken"] == 4 and "partial/taken" not in maker.metrics()


def test_an_agent_without_log_probs_is_refused_only_if_the_ratio_or_its_correction_needs_them(tmp_path):
    base, correction = dict(offpolicy__ratio_base="rollout"), dict(algo__advantage__is_correction_level="token")
    asynchronous = dict(policy_loss="ppo", train__async_enable=True)
    unweighted = DECOUPLED | dict(offpolicy__weight="none")
    weighed = unweighted | dict(bapo__token_weight="rollout_prob")
    for flags in (base, correction, STALE[2], asynchronous, DECOUPLED, DECOUPLED | STALE[1], TAPERED, weighed):
        maker = make_maker(tmp_path, **flags)
        with pytest.raises(ValueError, match=r"--train.agent_func_path returned no rollout_log_probs.*ratio_base re"):
            experience_of(maker, [pipeline.response(3)] * 3)
    for flags in (dict(), asynchronous | dict(offpolicy__ratio_base="recomputed")):
        maker = make_maker(tmp_path, **flags)
        experience_of(maker, [pipeline.response(3)] * 3)
        assert maker.metrics() == {"offpolicy/mixed_versions": 0}


def test_without_an_off_policy_feature_the_experience_is_openrlhfs_own(tmp_path):
    maker = make_maker(tmp_path, policy_loss="ppo")
    experience = experience_of(maker, RESPONSES)
    assert experience.versions is experience.staleness is experience.optimizer_steps is None and maker.metrics() == {}
    batches = maker.make_experience_batch(rollout(maker))
    assert maker.pool is None and maker.fresh is batches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_returns_without_discount_are_those_of_openrlhfs_loop_to_the_bit(tmp_path, monkeypatch, dtype):
    maker, generator = make_maker(tmp_path), torch.Generator().manual_seed(0)
    rewards = (torch.randn(5, 300, generator=generator) * torch.rand(5, 1, generator=generator) ** 8).to(dtype)
    mask = (torch.arange(300) < torch.tensor([[0], [1], [7], [299], [300]])).long()
    upstream = Upstream.get_cumulative_returns(maker, rewards, mask, 1.0)
    monkeypatch.delattr(Upstream, "get_cumulative_returns")  # the loop takes minutes on long responses
    found = maker.get_cumulative_returns(rewards, mask, 1.0)
    assert found.dtype == dtype
    assert torch.equal(found.contiguous().view(torch.uint8), upstream.view(torch.uint8))  # also -0.0


@pytest.mark.parametrize("mask", [[1] * 6, [0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 1], [0, 1, 0, 1, 0, 1]], ids=str)
def test_the_tokens_between_an_agents_actions_are_no_steps_of_gae_and_of_discounted_returns(tmp_path, mask):
    maker, generator, mask = make_maker(tmp_path), torch.Generator().manual_seed(0), torch.tensor([mask] * 2)
    values, rewards = torch.randn(2, 2, 6, generator=generator)  # also between the actions, where they mean nothing
    alone = [tensor[mask > 0].view(2, -1) for tensor in (values, rewards, mask)]
    found = maker.get_advantages_and_returns(values, rewards, mask, 0.9, 0.8)
    for ours, expected in zip(found, Upstream.get_advantages_and_returns(maker, *alone, 0.9, 0.8), strict=True):
        assert torch.equal(ours[mask > 0], expected.flatten()) and not ours[mask == 0].any()
    returns = maker.get_cumulative_returns(rewards, mask, 0.9)
    assert torch.equal(returns[mask > 0], Upstream.get_cumulative_returns(maker, *alone[1:], 0.9).flatten())
    if mask[0].diff().abs().sum() <= 2:  # no gap: bit by bit OpenRLHF's
        upstream = Upstream.get_advantages_and_returns(maker, values, rewards, mask, 0.9, 0.8)
        assert all(torch.equal(ours[mask > 0], theirs[mask > 0]) for ours, theirs in zip(found, upstream, strict=True))


def test_the_length_penalty_counts_an_agents_actions_and_not_the_tokens_between_them(tmp_path):
    lengths = dict(rollout__max_new_tokens=8, reward__overlong_buffer_len=4)
    maker = make_maker(tmp_path, rollout__micro_batch_size=4, **lengths)
    # Two actions of 2 tokens with 20 tokens in between, and one action of 6 tokens.
    turns = {"observation_tokens": [5] * 26, "action_ranges": [(2, 4), (24, 26)], "versions": [[0] * 2] * 2}
    responses = [pipeline.response(reward=1.0) | turns] * 3 + [pipeline.response(6, reward=1.0)]
    experience = experience_of(maker, responses)
    assert experience.response_length.tolist() == [4, 4, 4, 6]
    maker.compute_advantages_and_returns([experience])
    assert experience.rewards.tolist() == [1, 1, 1, 0.5]


# ---- replay ----


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_whole_replayed_group_joins_the_next_rollout_unchanged(tmp_path, monkeypatch, dynamic):
    flags = dict(train__dynamic_batch_enable=True, rollout__max_tokens_per_gpu=16) if dynamic else {}
    flags |= dict(algo__kl__use_loss=True, algo__kl__estimator="k3", algo__kl__init_coef=0.01)
    maker = make_maker(tmp_path, replay__ratio=0.5, replay__strategy="oldest", **flags)
    maker.initial_model_group, maker.critic_model_group = Actors(-0.2), Actors(1.0)  # a KL loss, and values
    monkeypatch.delattr(type(maker), "_recompute_denominators")  # without a forward pass, which decoupled takes
    first = joined(maker.make_experience_batch(rollout(maker)))
    assert len(first) == 16  # nothing to replay yet: a group is not replayed beside itself
    metrics = maker.metrics()
    assert (metrics["replay/groups_added"], metrics["replay/groups_sampled"], metrics["replay/size"]) == (4, 0, 4)
    assert [int(sample.response_length) for sample in first] == [1, 2, 3, 4] * 4  # the groups in the order of prompts

    kept = [sample for group in maker.pool._groups.values() for sample in group.samples]
    assert all(not {"staleness", "optimizer_steps"} & sample.keys() for sample in kept)  # they would only take memory
    assert all({"base_action_log_probs", "values", "rollout_log_probs"} < sample.keys() for sample in kept)
    publish(maker, 2)
    batches = maker.make_experience_batch(rollout(maker, version=2))
    # OpenRLHF splits dynamic batches again, so padding would be wasted.
    assert len(batches) == (24 if dynamic else 1)
    assert not dynamic or all(batch.sequences.shape == (1, int(batch.total_length)) for batch in batches)
    second = joined(batches)
    fresh, replayed = second[:16], second[16:]
    assert len(replayed) == 2 * NUM_SAMPLES
    assert all(set(tokens_of(sample, "staleness")) == {0} for sample in fresh)
    assert {sample.start_log_probs for sample in second} == {None}  # of all or of none, for ranks must do the same
    for before, after in zip(first[: 2 * NUM_SAMPLES], replayed, strict=True):
        assert tokens_of(after, "staleness") == [2] * int(after.response_length)
        assert tokens_of(after, "optimizer_steps") == [1 + 2] * int(after.response_length)
        for field in fields(before):
            value, found = getattr(before, field.name), getattr(after, field.name)
            if isinstance(value, torch.Tensor) and field.name not in ("staleness", "optimizer_steps"):
                assert torch.equal(found, value) and found.dtype == value.dtype, field.name
        assert {k: float(v) for k, v in after.info.items()} == {k: float(v) for k, v in before.info.items()}
    metrics = maker.metrics()
    assert (metrics["replay/groups_sampled"], metrics["replay/groups_exhausted"]) == (2, 2)
    assert metrics["replay/samples_dropped"] == 0
    assert [len(batch.sequences) for batch in maker.fresh] != [24]  # the statistics are those of the rollout
    assert sum(len(batch.sequences) for batch in maker.fresh) == 16


def test_a_group_in_the_pool_is_as_old_as_its_oldest_action_token_and_has_rewards_that_differ(tmp_path):
    maker = make_maker(tmp_path, replay__ratio=1, replay__max_staleness=2)
    publish(maker, 5)
    samples = rollout(maker, version=5)
    samples[6].versions[samples[6].action_mask > 0] = 4  # one sample of the second group
    samples[0].versions[samples[0].action_mask == 0] = 1  # the prompt was generated by nobody
    for sample in samples[2 * NUM_SAMPLES : 3 * NUM_SAMPLES]:
        sample.rewards = torch.tensor([1.0])
    maker.make_experience_batch(samples)
    assert sorted(group.oldest_version for group in maker.pool._groups.values()) == [4, 5, 5]
    metrics = maker.metrics()
    assert (metrics["replay/groups_skipped"], metrics["replay/groups_added"]) == (1, 3)


@pytest.mark.parametrize(
    ("ratio", "num_fresh", "batch_size", "num_replayed"),
    [
        (0.5, 4, 8, 2),
        (0.5, 3, 4, 2),  # a short rollout: round(1.5) groups, and any number fills steps of one group
        (0.5, 3, 8, 1),  # 3 + 1 groups of 4 make whole steps of 8
        (1, 4, 16, 4),
        (1, 4, 12, 2),  # of up to 4, the most that make whole steps: 6 groups of 4
        (2, 4, 8, 6),  # no more than are there, and whole steps
        (0.25, 2, 4, 0),  # half a group
    ],
)
def test_as_many_groups_are_replayed_as_asked_for_that_make_whole_optimizer_steps(
    tmp_path, ratio, num_fresh, batch_size, num_replayed
):
    maker = make_maker(tmp_path, replay__ratio=ratio, train__batch_size=batch_size, rollout__batch_size=24)
    maker.make_experience_batch(rollout(maker, num_prompts=6))
    (batch,) = maker.make_experience_batch(rollout(maker, num_prompts=num_fresh))
    assert len(batch.sequences) == (num_fresh + num_replayed) * NUM_SAMPLES
    metrics = maker.metrics()
    assert (metrics["replay/groups_sampled"], metrics["replay/samples_dropped"]) == (num_replayed, 0)


class ActorsOfVersion(Actors):
    """The same, whose log-probs fall with every version; notes the shapes of the batches of each call."""

    def __init__(self, maker) -> None:
        super().__init__()
        self.maker, self.calls = maker, []

    def async_run_method_batch(self, method_name: str, **batches) -> list:
        self.calls.append([tuple(sequences.shape) for sequences in batches["sequences"]])
        (found,) = super().async_run_method_batch(method_name, **batches)
        return [[log_probs - self.maker.policy_version for log_probs in found]]


def decoupled_maker(directory, **flags):
    maker = make_maker(directory, **DECOUPLED | flags)
    maker.actor_model_group = ActorsOfVersion(maker)
    return maker


def test_tapered_keeps_with_replayed_samples_the_behavior_log_probs_of_their_rollout(tmp_path):
    maker = decoupled_maker(tmp_path, replay__ratio=1, **TAPERED)
    maker.make_experience_batch(rollout(maker))  # fresh: the actor's of version 0
    publish(maker, 2)
    samples = joined(maker.make_experience_batch(rollout(maker, version=2, log_prob=-0.52)))
    for sample in samples:
        tokens = sample.sequences[1:][sample.action_mask > 0].float()
        version = 2 - tokens_of(sample, "staleness")[0]
        assert torch.equal(sample.action_log_probs[sample.action_mask > 0], -tokens / 100 - 2)
        assert torch.equal(sample.rollout_log_probs[sample.action_mask > 0], -tokens / 100 - version)


@pytest.mark.parametrize(
    ("flags", "num_batches"),
    [
        (dict(rollout__micro_batch_size=3), 6),  # of 16 samples
        (dict(rollout__micro_batch_size=16, actor__num_gpus_per_node=2, rollout__batch_size=8), 2),
        (dict(train__dynamic_batch_enable=True, rollout__max_tokens_per_gpu=16), 5),  # of 72 tokens
    ],
    ids=str,
)
def test_decoupled_recomputes_the_denominators_of_replayed_samples_with_the_current_weights(
    tmp_path, flags, num_batches
):
    maker = decoupled_maker(tmp_path, replay__ratio=1, **flags)
    maker.make_experience_batch(rollout(maker))
    kept = [sample for group in maker.pool._groups.values() for sample in group.samples]
    assert all(set(sample["behavior_log_probs"][sample["action_mask"]].tolist()) == {-0.5} for sample in kept)
    publish(maker, 2)
    maker.actor_model_group.calls.clear()
    samples = joined(maker.make_experience_batch(rollout(maker, version=2, log_prob=-0.52)))
    assert len(samples) == 32
    for sample in samples:
        tokens = sample.sequences[1:][sample.action_mask > 0]
        assert torch.equal(sample.action_log_probs[sample.action_mask > 0], -tokens.float() / 100 - 2)
        (engines,) = set(tokens_of(sample, "rollout_log_probs"))
        assert engines == pytest.approx(-0.5 if tokens_of(sample, "staleness")[0] == 2 else -0.52)
    assert sum(tokens_of(sample, "staleness")[0] == 2 for sample in samples) == 16
    _, replayed = maker.actor_model_group.calls  # one pass over the fresh samples, one over the others
    assert len(replayed) == num_batches and sum(size for size, _ in replayed) == 16


def test_decoupled_gives_every_rank_a_batch_of_a_single_replayed_group(tmp_path):
    eight = dict(actor__num_gpus_per_node=8, rollout__micro_batch_size=2, train__batch_size=16)
    maker = decoupled_maker(tmp_path, replay__ratio=1, **eight)
    maker.make_experience_batch(rollout(maker))
    group = [maker._from_pool(sample) for sample in next(iter(maker.pool._groups.values())).samples]
    publish(maker, 1)
    maker.actor_model_group.calls.clear()
    maker._recompute_denominators(group, 8)
    assert [size for size, _ in maker.actor_model_group.calls[0]] == [1] * 8
    assert all(tokens_of(sample, "action_log_probs")[0] == pytest.approx(-1.06) for sample in group)


def test_only_names_that_the_reward_logs_for_all_samples_are_logged(tmp_path):
    maker = make_maker(tmp_path, replay__ratio=1)
    for version, logs in enumerate(({"old": 1.0, "both": 2.0}, {"both": 3.0, "new": 4.0})):
        publish(maker, version)
        responses = [
            [pipeline.response(2, float(i), version) | {"extra_logs": logs} for i in range(NUM_SAMPLES)]
            for _ in range(4)
        ]
        (batch,) = maker.make_experience_batch([sample for group in responses for sample in generated(maker, group)])
        dropped = maker.metrics()["replay/logs_dropped"]
    assert len(batch.sequences) == 32 and dropped == 2
    assert {"old", "new"}.isdisjoint(batch.info) and sorted(batch.info["both"]) == [2.0] * 16 + [3.0] * 16


@pytest.mark.parametrize("ratio", [0, 1])
def test_what_a_reward_logs_for_some_samples_only_is_their_mean(tmp_path, ratio):
    maker = make_maker(tmp_path, replay__ratio=ratio, train__micro_batch_size=1, rollout__micro_batch_size=1)
    responses = [
        [
            pipeline.response(2, float(i)) | {"extra_logs": {"all": 1.0} | ({"some": 3.0 * i} if i % 2 else {})}
            for i in range(NUM_SAMPLES)
        ]
        for _ in range(4)
    ]
    batches = maker.make_experience_batch([sample for group in responses for sample in generated(maker, group)])
    metrics = maker.metrics()
    assert metrics["some"] == (3 + 9) / 2 and metrics.get("replay/logs_dropped", 0) == 0
    assert all("some" not in batch.info and "all" in batch.info for batch in batches)


def test_expired_groups_are_not_drawn_and_do_not_count_when_whole_optimizer_steps_are_planned(tmp_path):
    maker = make_maker(tmp_path, replay__ratio=1, replay__max_staleness=1)
    publish(maker, 1)
    maker.make_experience_batch([*rollout(maker, 3, version=0), *rollout(maker, 1, version=1)])
    publish(maker, 2)
    maker.metrics()
    # One group is left, and with it four fresh ones would make half an optimizer step too many.
    (batch,) = maker.make_experience_batch(rollout(maker, version=2))
    assert len(batch.sequences) == 16
    metrics = maker.metrics()
    assert (metrics["replay/groups_expired"], metrics["replay/groups_sampled"]) == (3, 0)


def test_all_available_groups_are_replayed_if_no_number_of_them_fills_whole_steps(tmp_path):
    class Pool(list):
        def sample(self, *_) -> list:
            return []

    maker = make_maker(tmp_path, replay__ratio=1, rollout__batch_size=3, train__batch_size=12)  # steps of 3 groups
    assert [maker._num_replayed(Pool([None]), num_fresh) for num_fresh in (2, 3, 4)] == [1, 0, 1]


@pytest.mark.parametrize(("ratio", "ages"), [(1, [0, 1] * 16), (0.5, [0, 1, *[0, 0, 1] * 7, 0])])
def test_ranks_that_share_a_sequence_count_as_one(tmp_path, ratio, ages):
    ring = dict(actor__num_gpus_per_node=2, ds__ring_attn_size=2, ds__packing_samples=True)
    maker = make_maker(tmp_path, replay__ratio=ratio, **ring)
    (batch,) = maker.make_experience_batch(rollout(maker))
    assert len(batch.sequences) == 16
    maker.count_version()
    (batch,) = maker.make_experience_batch(rollout(maker, version=maker.policy_version))
    # Fresh and replayed samples take turns, because upstream does not shuffle them here.
    assert batch.staleness.amax(-1).tolist() == ages


@pytest.mark.parametrize(
    ("flags", "num_prompts", "num_samples", "num_dropped"),
    [
        # 3 prompts of 3 samples: 9 samples, in optimizer steps of 4 on two ranks.
        (dict(actor__num_gpus_per_node=2), 3, [4, 4], 1),
        (dict(actor__num_gpus_per_node=2), 2, [2, 2], 2),
        (dict(), 3, [8], 1),
        (dict(train__dynamic_batch_enable=True, train__batch_size=6), 3, [1] * 6, 3),
    ],
)
def test_samples_of_a_short_rollout_that_fill_no_step_are_counted_as_dropped(
    tmp_path, flags, num_prompts, num_samples, num_dropped
):
    sizes = dict(rollout__n_samples_per_prompt=3, rollout__batch_size=4, train__batch_size=4)
    maker = make_maker(tmp_path, replay__ratio=1, **sizes | flags)
    samples = [s for i, s in enumerate(rollout(maker, num_prompts)) if i % NUM_SAMPLES]  # 3 of 4
    batches = maker.make_experience_batch(samples)
    assert [len(batch.sequences) for batch in batches] == num_samples
    assert maker.metrics()["replay/samples_dropped"] == num_dropped
    # Each rank has every other sample: the last ones are dropped.
    kept, num_parts = samples[: len(samples) - num_dropped], maker.args.actor.num_gpus_per_node
    expected = [sample.sequences.numel() for rank in range(num_parts) for sample in kept[rank::num_parts]]
    assert [sample.sequences.numel() for sample in joined(batches)] == expected


# ---- checkpoints ----


def test_only_a_kl_loss_with_a_coefficient_makes_a_saved_pool_another(tmp_path):
    def fingerprint(**flags) -> dict[str, str]:
        return _replay_fingerprint(make_maker(tmp_path, replay__ratio=1, **flags).args)

    kl_loss = dict(algo__kl__use_loss=True, algo__kl__estimator="k3")
    assert fingerprint() == fingerprint(**kl_loss, algo__kl__init_coef=0)
    assert fingerprint() != fingerprint(**kl_loss, algo__kl__init_coef=0.01)


def test_pools_are_removed_with_their_checkpoint_and_without_deepspeeds_checkpoints_not_written(tmp_path):
    maker, saved = make_maker(tmp_path, replay__ratio=0.5, ckpt__path=tmp_path / "ckpt"), tmp_path / "ckpt/_replay"
    maker.make_experience_batch(rollout(maker))
    publish(maker, 3)
    trainer, actors = Namespace(experience_maker=maker, args=maker.args), tmp_path / "ckpt/_actor"
    for tag in ("global_step2", "best_global_step4"):
        save_pools(trainer, tag)
        (actors / tag).mkdir(parents=True)
        (actors / "latest").write_text(tag)
    maker.args.ckpt.load_enable = True
    pool, state = load_saved_pool(maker.args)
    assert (len(pool), state["policy_version"]) == (len(maker.pool), 3)

    (actors / "global_step2").rmdir()  # as OpenRLHF prunes
    (saved / "best_global_step4").rename(saved / "best_global_step4.old")
    remove_pruned(maker.args)
    assert [path.name for path in saved.iterdir()] == ["best_global_step4.old"]
    assert len(load_saved_pool(maker.args)[0]) == len(maker.pool)

    maker.args.ckpt.disable_ds = True
    save_pools(trainer, "global_step9")
    assert not (saved / "global_step9").exists()


@pytest.mark.parametrize(("module", "name"), [("ppo_trainer", "PPOTrainer"), ("ppo_trainer_async", "TrainingActor")])
def test_pools_of_checkpoints_that_a_best_checkpoint_replaced_are_removed_at_once(tmp_path, module, name):
    trainer = getattr(importlib.import_module(f"openrlhf.trainer.{module}"), name)
    for folder in ("_actor/best_global_step4", "_replay/best_global_step4", "_replay/best_global_step2"):
        (tmp_path / folder).mkdir(parents=True)
    args = Namespace(ckpt=Namespace(path=tmp_path, best_metric_key=""))
    run = Namespace(args=args, counted={"made": 4})
    trainer.__ray_metadata__.modified_class.save_best_checkpoint(run, {}, global_step=4)
    assert [path.name for path in (tmp_path / "_replay").iterdir()] == ["best_global_step4"]


@pytest.mark.parametrize("latest", ["global_step4", "best_global_step4"])
def test_of_two_checkpoints_of_a_step_the_one_that_openrlhf_calls_latest_is_resumed(tmp_path, latest):
    for tag in ("global_step4", "best_global_step4"):
        pipeline.make_checkpoint(tmp_path / "ckpt/_actor" / tag)
    (tmp_path / "ckpt/_actor/latest").write_text(latest)
    pipeline.make_model(tmp_path)
    argv = pipeline.flags(tmp_path, ckpt__path=tmp_path / "ckpt", ckpt__load_enable=True)
    assert pipeline.parse(argv).ckpt.resume_from == latest


def test_a_run_resumes_the_newest_checkpoint_whose_saved_states_all_load_and_says_so(tmp_path, capsys):
    path, groups = tmp_path / "ckpt", ("_actor", "_critic")
    flags = dict(replay__ratio=1, ckpt__path=path, algo__advantage__estimator="gae")
    argv = [*pipeline.flags(tmp_path, **flags), "--ckpt.load_enable"]
    maker = make_maker(tmp_path, **flags)
    trainer = Namespace(experience_maker=maker, args=maker.args)

    def save(step: int) -> None:
        for group in groups:
            pipeline.make_checkpoint(path / group / f"global_step{step}")
            (path / group / "latest").write_text(f"global_step{step}")

    def resumed() -> tuple[int, list[str]]:
        args = pipeline.parse(argv)
        use_checkpoint(Namespace(**{"ckpt.resume_from": args.ckpt.resume_from, "ckpt.path": args.ckpt.path}))
        step = load_saved_pool(args)[1]["policy_version"]
        assert [args.ckpt.resume_from, *((path / group / "latest").read_text() for group in groups)] == (
            [f"global_step{step}"] * 3
        )
        return step, capsys.readouterr().err.splitlines()

    for step in (2, 4, 6, 10):
        publish(maker, step)
        save_pools(trainer, f"global_step{step}")
        save(step)
    assert resumed() == (10, [])
    # A critic that had not got as far, then a pool that is missing, then one that is damaged.
    (path / "_critic/latest").write_text("global_step6")
    assert resumed() == (6, [])
    shutil.rmtree(path / "_replay/global_step6")
    missing = f"because {path}/_replay/global_step6/pool.json is missing"
    step, (line,) = resumed()
    assert step == 4 and f"resumes global_step4, {missing}" in line
    (path / "_replay/global_step4/groups.safetensors").write_text("")
    step, (line,) = resumed()
    assert step == 2 and f"{path}/_replay/global_step4/groups.safetensors is damaged" in line
    for step in (4, 6):  # their pools cannot be used, and the line is about that of 6
        save(step)
    step, (line,) = resumed()
    assert step == 2 and f"resumes global_step2, {missing}" in line
    # The pool of step 4 is whole again, but its critic is missing. The resume has removed what was newer.
    save_pools(trainer, "global_step4")
    shutil.rmtree(path / "_critic/global_step4")
    save(6)
    assert resumed()[0] == 2
    shutil.rmtree(path / "_replay")
    assert "_replay/global_step2" in pipeline.refusal(argv, capsys)
    assert pipeline.parse([*argv, "--replay.discard_saved"]).ckpt.resume_from == "global_step2"
    assert pipeline.parse(pipeline.flags(tmp_path, **flags)).ckpt.resume_from is None


ESTIMATORS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce")


def advantages_of(maker, rewards: list[float]) -> list[float]:
    """Each sample's advantage at its first token; every group has four samples, of 1 to 4 tokens."""
    responses = [pipeline.response(1 + i % 4, reward) for i, reward in enumerate(rewards)]
    groups = [responses[start : start + NUM_SAMPLES] for start in range(0, len(rewards), NUM_SAMPLES)]
    samples = [sample for group in groups for sample in generated(maker, group)]
    found = joined(maker.make_experience_batch(samples))
    return [float(sample.advantages[sample.action_mask > 0][0]) for sample in found]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("reward", [0.1, 0.7, 0.9, 1 / 3, -0.3, 1.0, 0.0])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(tmp_path, estimator, reward):
    maker = make_maker(tmp_path, algo__advantage__estimator=estimator)
    assert advantages_of(maker, [reward] * 16) == [0.0] * 16
    assert maker.metrics()["rollout/equal_reward_groups"] == (1 if estimator == "flash_reinforce" else 4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_other_groups_keep_upstreams_advantages_to_the_bit(tmp_path, monkeypatch, estimator):
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(0)).tolist()
    rewards[4:8] = [0.5] * 4  # a mean without rounding
    ours = make_maker(tmp_path, algo__advantage__estimator=estimator)
    found = advantages_of(ours, rewards)
    assert ours.metrics()["rollout/equal_reward_groups"] == (0 if estimator == "flash_reinforce" else 1)
    theirs = make_maker(tmp_path, algo__advantage__estimator=estimator)
    monkeypatch.setattr(type(theirs), "compute_advantages_and_returns", Upstream.compute_advantages_and_returns)
    assert found == advantages_of(theirs, rewards)


@pytest.mark.parametrize(("estimator", "largest"), [("reinforce", "30"), ("dr_grpo", "15"), ("group_norm", "")])
def test_rewards_that_openrlhf_clips_are_said_once(tmp_path, capsys, estimator, largest):
    maker = make_maker(tmp_path, algo__advantage__estimator=estimator)
    for _ in range(2):
        advantages_of(maker, [30.0, 0.0] * 8)
    said = f"--reward.clip_range -10 10: clips a reward, less its baseline, of {largest}; usual"
    assert capsys.readouterr().out.count(said) == bool(largest)
