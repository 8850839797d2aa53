"""The replay pool: its limits compared with a plain-Python model, its draws, saving and loading."""

import math
import shutil
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import load_file

from openrlhf_bapo.offpolicy.replay_pool import SAMPLE_DTYPES, STRATEGIES, Group, ReplayConfig, ReplayPool
from openrlhf_bapo.offpolicy.saved_pool import SavedStateError

FINGERPRINT = {"model": "tiny", "tokenizer": "bytes"}


def make_group(
    uid: int = 0, versions=(0,), num_samples: int = 2, num_tokens: int = 4, advantage: float = 1.0, **fields
):
    """Make a group whose first token is `uid`. The first sample starts with tokens of `versions`, others are newer."""
    samples = []
    for index in range(num_samples):
        token_versions = torch.full((num_tokens - 1,), max(versions) + index)
        if index == 0:
            token_versions[: len(versions)] = torch.tensor(versions)
        samples.append(
            {
                "tokens": torch.arange(num_tokens) + uid,
                "action_mask": torch.ones(num_tokens - 1, dtype=torch.bool),
                "behavior_log_probs": -torch.rand(num_tokens - 1, generator=torch.Generator().manual_seed(uid)),
                "versions": token_versions,
                "advantages": torch.full((num_tokens - 1,), advantage * (-1) ** index),
            }
        )
    return Group(samples, **{"rewards": torch.arange(num_samples).float(), **fields})


def uid_of(group: Group) -> int:
    return int(group.samples[0]["tokens"][0])


def uids(groups) -> list[int]:
    return [uid_of(group) for group in groups]


def filled(config: ReplayConfig, num_groups: int = 6) -> ReplayPool:
    pool = ReplayPool(config)
    pool.add(make_group(uid, versions=(uid // 2,)) for uid in range(num_groups))
    return pool


configs = st.builds(
    ReplayConfig,
    capacity=st.integers(1, 12),
    max_staleness=st.integers(0, 4),
    max_reuse=st.integers(1, 3),
    strategy=st.sampled_from(STRATEGIES),
    skip_uninformative=st.booleans(),
    seed=st.sampled_from([0, 1, 2**63 - 1]),
)


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool, a twin that is never saved, and a model: a list of [uid, oldest version, times drawn] by arrival.

    The twin and the pool must make the same draws, although the pool is saved and loaded in between.
    """

    @initialize(config=configs)
    def start(self, config):
        self.config = config
        self.pool, self.twin = ReplayPool(config), ReplayPool(config)
        self.model, self.counts = [], Counter()
        self.keys, self.totals = {}, Counter()
        self.version, self.num_made = 10**6, 0  # as in a long run
        self.directory = Path(tempfile.mkdtemp())

    def teardown(self):
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)

    def leave(self, entries, counter):
        self.counts[counter] += len(entries)
        self.model = [entry for entry in self.model if entry not in entries]

    @rule(lags=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans(), st.floats(0, 2)), max_size=6))
    def add(self, lags):
        arguments = []
        for lag, extra_lag, informative, advantage in lags:
            versions = (self.version - lag, self.version - lag - extra_lag)
            rewards = torch.tensor([0.0, 1.0 if informative else 0.0])
            arguments.append(dict(uid=self.num_made, versions=versions, advantage=advantage, rewards=rewards))
            if informative or not self.config.skip_uninformative:
                self.model.append([self.num_made, min(versions), 0])
                self.counts["added"] += 1
            else:
                self.counts["skipped"] += 1
            self.num_made += 1
        by_age = sorted(self.model, key=lambda entry: (entry[1], entry[0]))
        self.leave(by_age[: max(0, len(by_age) - self.config.capacity)], "evicted")
        self.pool.add(make_group(**settings) for settings in arguments)
        self.twin.add(make_group(**settings) for settings in arguments)

    @rule(num_groups=st.integers(0, 8), published=st.integers(0, 3))
    def sample(self, num_groups, published):
        self.version += published
        stale = [entry for entry in self.model if self.version - entry[1] > self.config.max_staleness]
        self.leave(stale, "expired")
        drawn = self.pool.sample(num_groups, self.version)
        assert [(g.key, uid_of(g)) for g in drawn] == [
            (g.key, uid_of(g)) for g in self.twin.sample(num_groups, self.version)
        ]

        found = uids(drawn)
        assert len(set(found)) == len(found) == min(num_groups, len(self.model))
        by_age = sorted(self.model, key=lambda entry: (entry[1], entry[0]))
        if self.config.strategy == "newest":
            assert found == [entry[0] for entry in by_age[::-1][:num_groups]]
        if self.config.strategy == "oldest":
            assert found == [entry[0] for entry in by_age[:num_groups]]
        entries = {entry[0]: entry for entry in self.model}
        for group in drawn:
            entry = entries[uid_of(group)]  # nothing that had left comes back
            entry[2] += 1
            assert group.num_reused == entry[2] <= self.config.max_reuse
            tokens = [sample["versions"][sample["action_mask"]] for sample in group.samples]
            assert self.version - int(torch.cat(tokens).min()) <= self.config.max_staleness
            assert self.keys.setdefault(uid_of(group), group.key) == group.key
        assert len(set(self.keys.values())) == len(self.keys)
        self.counts["sampled"] += len(drawn)
        self.leave([entry for entry in self.model if entry[2] >= self.config.max_reuse], "exhausted")

    @rule()
    def save_and_load(self):
        self.pool.save(self.directory / "pool", self.version, FINGERPRINT)
        self.pool, version = ReplayPool.load(self.directory / "pool", self.config, FINGERPRINT)
        assert version == self.version

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def no_group_is_lost_or_counted_twice(self):
        assert len(self.pool) == len(self.model) <= self.config.capacity
        metrics = self.pool.metrics()
        self.twin.metrics()
        for name in ("added", "skipped", "sampled", "expired", "exhausted", "evicted"):
            assert metrics[f"replay/groups_{name}"] == self.counts[name], name
        assert metrics["replay/size"] == len(self.model)
        assert metrics["replay/bytes"] == sum(group.num_bytes for group in self.pool._groups.values())
        reuses = [entry[2] for entry in self.model]
        assert metrics["replay/reuse_mean"] == pytest.approx(sum(reuses) / max(len(reuses), 1))
        self.totals.update(self.counts)
        left = self.totals["exhausted"] + self.totals["expired"] + self.totals["evicted"]
        assert self.totals["added"] - left == len(self.pool)
        self.counts.clear()


def test_the_default_settings_are_those_of_the_readme():
    assert ReplayConfig() == ReplayConfig(0.0, 1024, 4, 1, "uniform", True, 0)


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# Draws


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_operations_after_the_same_seed_give_the_same_draws(strategy):
    def draws(seed):
        pool = filled(ReplayConfig(strategy=strategy, seed=seed, max_reuse=9, max_staleness=99), 40)
        return [uids(pool.sample(7, version)) for version in range(20, 25)]

    assert draws(3) == draws(3)
    assert (draws(3) == draws(4)) == (strategy in ("newest", "oldest"))


@pytest.mark.parametrize(("strategy", "expected"), [("newest", [5, 4, 3, 2]), ("oldest", [0, 1, 2, 3])])
def test_newest_and_oldest_draw_in_the_order_of_versions(strategy, expected):
    assert uids(filled(ReplayConfig(strategy=strategy)).sample(4, 3)) == expected


def test_uniform_draws_every_group_equally_often():
    pool = filled(ReplayConfig(max_reuse=10**6, max_staleness=99), 8)
    counts = Counter(uid for _ in range(4000) for uid in uids(pool.sample(2, 4)))
    for uid in range(8):  # 4000 draws of probability 1/4: five standard deviations are 137
        assert abs(counts[uid] - 1000) < 137


def test_advantage_draws_the_first_group_with_probability_by_mean_abs_advantage():
    pool = ReplayPool(ReplayConfig(strategy="advantage", max_reuse=10**6))
    weights = [0.5, 1.0, 1.5, 3.0, 0.0]
    pool.add(make_group(uid, advantage=weight) for uid, weight in enumerate(weights))
    draws = [uids(pool.sample(2, 0)) for _ in range(4000)]
    first, second = (Counter(draw[place] for draw in draws) for place in (0, 1))
    for uid, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(first[uid] - 4000 * p) <= 5 * math.sqrt(4000 * p * (1 - p))
        # Without replacement: the second draw shares out what the first one left.
        q = sum(other / 6 * weight / (6 - other) for i, other in enumerate(weights) if i != uid)
        assert abs(second[uid] - 4000 * q) <= 5 * math.sqrt(4000 * q * (1 - q))


def test_advantage_draws_groups_of_zero_weight_last_and_in_any_order():
    pool = ReplayPool(ReplayConfig(strategy="advantage", max_reuse=10**6))
    pool.add(make_group(uid, advantage=float(uid == 4)) for uid in range(5))
    draws = [uids(pool.sample(9, 0)) for _ in range(400)]
    assert all(sorted(draw) == [0, 1, 2, 3, 4] and draw[0] == 4 for draw in draws)
    seconds = Counter(draw[1] for draw in draws)
    assert all(50 < seconds[uid] < 150 for uid in range(4))


TOKEN = st.tuples(st.integers(0, 9), st.floats(-3, 3), st.booleans())  # version, advantage, whether it is an action's


@given(st.lists(st.lists(TOKEN, max_size=3), min_size=1, max_size=3))
def test_age_and_weight_of_a_group_are_those_of_its_action_tokens(samples):
    made = []
    for tokens in samples:
        versions, advantages, mask = (torch.tensor([token[i] for token in tokens]) for i in range(3))
        advantages = torch.where(mask > 0, advantages, math.nan)
        made.append(dict(versions=versions, advantages=advantages, action_mask=mask))
    group = Group(made, torch.zeros(len(made)))
    actions = [(version, advantage) for tokens in samples for version, advantage, is_action in tokens if is_action]
    assert group.num_action_tokens == len(actions)
    assert group.oldest_version == min((version for version, _ in actions), default=2**31 - 1)
    weight = sum(abs(advantage) for _, advantage in actions) / max(len(actions), 1)
    assert group.mean_abs_advantage == pytest.approx(weight, rel=1e-5)


@given(st.lists(st.sampled_from([-1.0, 0.0, 1e-3, 1.0]), min_size=1, max_size=4))
def test_a_group_is_kept_unless_all_its_rewards_are_equal_whatever_their_order(rewards):
    pool = ReplayPool(ReplayConfig())
    pool.add([make_group(num_samples=len(rewards), rewards=torch.tensor(rewards))])
    assert len(pool) == (len(set(rewards)) > 1)


def test_a_group_with_nothing_to_train_on_is_skipped_and_counted():
    empty = make_group()
    for sample in empty.samples:
        sample["action_mask"] = torch.zeros(3, dtype=torch.bool)
    no_samples = Group([], torch.zeros(0))
    one_token = {name: torch.zeros(int(name == "tokens"), dtype=dtype) for name, dtype in SAMPLE_DTYPES.items()}
    only_prompts = Group([one_token, one_token], torch.arange(2))
    equal = make_group(rewards=torch.ones(2))
    for skip, num_kept in ((True, 1), (False, 2)):
        pool = ReplayPool(ReplayConfig(skip_uninformative=skip))
        pool.add([Group(empty.samples, empty.rewards), no_samples, only_prompts, equal, make_group()])
        metrics = pool.metrics()
        assert (metrics["replay/groups_added"], metrics["replay/groups_skipped"]) == (num_kept, 5 - num_kept)
    assert no_samples.oldest_version == 2**31 - 1 and no_samples.num_action_tokens == 0


def test_a_group_cannot_be_added_while_it_is_in_the_pool():
    pool = ReplayPool(ReplayConfig(max_reuse=2))
    pool.add([make_group()])
    drawn = pool.sample(1, 0)
    with pytest.raises(ValueError, match="group 0 is in the pool already"):
        pool.add(drawn)


# Tensors


def test_tensors_are_converted_if_their_dtype_differs_and_are_not_copied_otherwise():
    sample = {
        "tokens": torch.arange(4),
        "action_mask": torch.tensor([0, 1, 1]),
        "behavior_log_probs": torch.rand(3, dtype=torch.float64),
        "versions": torch.zeros(3, dtype=torch.int64),
        "advantages": torch.rand(3).bfloat16(),
        "image": torch.rand(5, dtype=torch.float64),
        "length": torch.tensor(4),
    }
    given_tensors = dict(sample)
    kept = Group([sample], torch.tensor([1])).samples[0]
    assert {name: kept[name].dtype for name in SAMPLE_DTYPES} == SAMPLE_DTYPES
    assert kept["image"] is sample["image"] and kept["length"] is sample["length"]
    assert all(sample[name] is tensor for name, tensor in given_tensors.items())  # the caller's dict stays as it was
    again = Group([kept], torch.tensor([1.0])).samples[0]
    assert all(again[name] is kept[name] for name in kept)

    pool = ReplayPool(ReplayConfig(skip_uninformative=False))
    pool.add([Group([kept], torch.tensor([1.0]))])
    assert all(tensor is kept[name] for name, tensor in pool.sample(1, 0)[0].samples[0].items())


def test_a_view_is_cloned_so_that_the_memory_of_its_batch_is_freed():
    batch = torch.rand(64, 100)
    group = make_group(rewards=torch.arange(64).float()[:2])
    group = Group(
        [{**s, "advantages": batch[0, :3], "row": batch[1], "one": batch[2, 3]} for s in group.samples], group.rewards
    )
    for tensor in [group.rewards, *(tensor for sample in group.samples for tensor in sample.values())]:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert torch.equal(group.samples[0]["row"], batch[1]) and group.samples[0]["one"] == batch[2, 3]


def test_a_token_of_a_long_response_takes_seventeen_bytes():
    group = make_group(num_samples=8, num_tokens=1000)
    assert group.num_bytes / 8000 == pytest.approx(17, abs=0.05)


def test_an_invalid_group_is_refused():
    group = make_group()
    with pytest.raises(ValueError, match=r"rewards of shape \(3,\) do not fit 2 samples"):
        Group(group.samples, torch.zeros(3))
    with pytest.raises(ValueError, match=r"image of shape \(2, 2\) is not allowed"):
        Group([{**sample, "image": torch.zeros(2, 2)} for sample in group.samples], group.rewards)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(ratio=-1.0), "ratio -1.0 is not allowed; it must be at least 0"),
        (dict(ratio=math.inf), "ratio inf is not allowed; it must be at least 0"),
        (dict(capacity=0), "capacity 0 is not allowed; it must be at least 1"),
        (dict(max_staleness=-1), "max_staleness -1 is not allowed; it must be at least 0"),
        (dict(max_reuse=0), "max_reuse 0 is not allowed; it must be at least 1"),
        (dict(strategy="best"), f"strategy 'best' is not allowed; it must be one of {STRATEGIES}"),
        (dict(seed=-1), "seed -1 is not allowed; it must be at least 0 and below 2**63"),
        (dict(seed=2**63), f"seed {2**63} is not allowed; it must be at least 0 and below 2**63"),
    ],
)
def test_invalid_settings_are_refused_with_field_value_and_range(settings, message):
    with pytest.raises(ValueError) as refused:
        ReplayConfig(**settings)
    assert str(refused.value) == message


# Saving and loading


def test_a_loaded_pool_equals_the_saved_one(tmp_path):
    pool = ReplayPool(ReplayConfig(max_reuse=2, skip_uninformative=False))
    for uid in range(8):
        group = make_group(uid, num_samples=1 + uid % 3, num_tokens=2 + uid, advantage=1.0 + uid)
        extra = {"rewards": torch.tensor(-0.0), "a/b:c": torch.tensor([1.5], dtype=torch.bfloat16)}
        group.samples[-1].update(extra)  # names that only some samples have
        pool.add([Group(group.samples, group.rewards)])
    pool.sample(2, 0)
    pool.save(tmp_path / "pool", 3, FINGERPRINT)
    loaded, version = ReplayPool.load(tmp_path / "pool", pool.config, FINGERPRINT)
    assert version == 3 and {file.name for file in (tmp_path / "pool").iterdir()} == {"groups.safetensors", "pool.json"}
    assert (loaded.num_bytes, loaded.metrics()) == (pool.num_bytes, pool.metrics())
    for found, expected in zip(loaded._groups.values(), pool._groups.values(), strict=True):
        assert (found.key, found.num_reused) == (expected.key, expected.num_reused)
        assert torch.equal(found.rewards, expected.rewards)
        for ours, theirs in zip(found.samples, expected.samples, strict=True):
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                assert torch.equal(tensor, theirs[name]) and tensor.dtype == theirs[name].dtype
                assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_a_saved_pool_has_two_columns_per_tensor_under_the_names_of_the_format(tmp_path):
    filled(ReplayConfig(), 50).save(tmp_path / "pool", 0, FINGERPRINT)
    columns = "tokens:int32 action_mask:bool behavior_log_probs:float32 versions:int32 advantages:float32".split()
    names = {f"{kind}/{column}" for kind in ("values", "lengths") for column in columns}
    assert set(load_file(tmp_path / "pool" / "groups.safetensors")) == {"rewards", *names}


def test_a_pool_loaded_with_a_lower_capacity_and_max_reuse_keeps_to_them(tmp_path):
    config = ReplayConfig(max_reuse=3, max_staleness=99, strategy="oldest")
    pool = filled(config, 6)
    pool.sample(2, 0)
    pool.metrics()
    pool.save(tmp_path / "pool", 0, FINGERPRINT)
    loaded, _ = ReplayPool.load(tmp_path / "pool", replace(config, max_reuse=1, capacity=3), FINGERPRINT)
    metrics = loaded.metrics()
    assert (metrics["replay/groups_exhausted"], metrics["replay/groups_evicted"]) == (2, 1)
    assert uids(loaded.sample(9, 0)) == [3, 4, 5]


def test_a_pool_saved_for_another_model_is_refused_with_the_flag_that_starts_without_it(tmp_path):
    filled(ReplayConfig()).save(tmp_path / "pool", 0, FINGERPRINT)
    with pytest.raises(SavedStateError, match=r"model 'tiny', but this run has model 'large'.*--replay.discard_saved"):
        ReplayPool.load(tmp_path / "pool", ReplayConfig(), FINGERPRINT | {"model": "large"})
