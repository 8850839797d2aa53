"""The pool of unfinished responses: its behavior compared with a plain-Python model, saving and loading."""

import math
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from safetensors.torch import load_file

from openrlhf_bapo.offpolicy.partial_rollouts import ON_STALE, REASONS, PartialConfig, PartialPool
from openrlhf_bapo.offpolicy.saved_pool import SavedStateError

FINGERPRINT = {"model": "tiny", "tokenizer": "bytes"}

configs = st.builds(
    PartialConfig,
    token_budget=st.just(4),
    max_segments=st.integers(0, 3),
    max_staleness=st.integers(0, 3),
    on_stale=st.sampled_from(ON_STALE),
)


class PoolAgainstModel(RuleBasedStateMachine):
    """The pool and a model. The model has, by prompt (a number), the responses: (version, segment) of each token, and
    whether the response is complete."""

    @initialize(config=configs)
    def begin(self, config):
        self.config = config
        self.pool = PartialPool(config)
        self.groups = {}
        self.counts, self.totals, self.segments = Counter(), Counter(), []
        self.version = self.num_started = self.num_rollouts = 0
        self.directory = Path(tempfile.mkdtemp())

    def teardown(self):
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)

    def oldest(self, prompt) -> float:
        return min((version for r in self.groups[prompt] for version, _ in r["tokens"]), default=math.inf)

    def is_complete(self, prompt) -> bool:
        return all(response["outcome"] for response in self.groups[prompt])

    def at_last_segment(self, response) -> bool:
        num_segments = len({segment for _, segment in response["tokens"]})
        return 0 < self.config.max_segments <= num_segments and not response["outcome"]

    def leave(self, prompts, counter):
        for prompt in prompts:
            self.counts[counter] += 1
            if counter != "taken":
                self.counts["tokens_wasted"] += sum(len(response["tokens"]) for response in self.groups[prompt])
            del self.groups[prompt]

    def check_content(self, group) -> None:
        """Assert that the group has the tokens that it grew by, in order, and no others."""
        for response, expected in zip(group.responses, self.groups[group.prompt], strict=True):
            assert response.versions.tolist() == [version for version, _ in expected["tokens"]]
            assert response.tokens.tolist() == list(range(len(expected["tokens"])))
            assert response.behavior_log_probs.tolist() == [-float(n) for n in range(len(expected["tokens"]))]
            lengths = Counter(segment for _, segment in expected["tokens"])
            assert response.segments == [lengths[segment] for segment in sorted(lengths)]
            assert response.num_tokens == len(expected["tokens"])
            assert response.outcome == expected["outcome"]
        assert (group.label, group.prompt_tokens) == ({"answer": group.prompt}, [7, group.prompt])

    @rule(num_samples=st.integers(1, 3))
    def start(self, num_samples):
        group = self.pool.start(self.num_started, {"answer": self.num_started}, num_samples)
        assert group in self.pool.unfinished
        group.prompt_tokens = [7, self.num_started]
        self.groups[self.num_started] = [{"tokens": [], "outcome": None} for _ in range(num_samples)]
        self.num_started += 1
        self.counts["started"] += 1

    @rule(data=st.data())
    def roll_out(self, data):
        """Let every unfinished response grow by a random number of tokens. The weights may change in between."""
        self.num_rollouts += 1
        for group in self.pool.unfinished:
            for response, expected in zip(group.responses, self.groups[group.prompt], strict=True):
                if expected["outcome"]:
                    continue
                num_new = data.draw(st.integers(0, self.config.token_budget))
                changed_after = data.draw(st.integers(0, 20))
                versions = [self.version + (i >= changed_after) for i in range(num_new)]
                ends = num_new > 0 and data.draw(st.booleans())
                total = range(len(expected["tokens"]), len(expected["tokens"]) + num_new)
                self.counts["resumed"] += num_new > 0 and len(expected["tokens"]) > 0
                expected["tokens"] += [(version, self.num_rollouts) for version in versions]
                expected["outcome"] = {"reward": num_new / 4, "truncated": False} if ends else None
                self.pool.grow(response, list(total), [-float(n) for n in total], versions, expected["outcome"])
        self.version += any(
            version > self.version for r in self.groups.values() for s in r for version, _ in s["tokens"]
        )

    @rule(data=st.data())
    def restart(self, data):
        """Restart a random response of a group."""
        for group in (self.pool.unfinished + self.pool.complete)[:1]:
            place = data.draw(st.integers(0, len(group.responses) - 1))
            self.pool.restart(group.responses[place])
            self.counts["tokens_wasted"] += len(self.groups[group.prompt][place]["tokens"])
            self.groups[group.prompt][place] = {"tokens": [], "outcome": None}

    @rule(published=st.integers(0, 3))
    def expire(self, published):
        self.version += published
        stale = [p for p in self.groups if self.version - self.oldest(p) > self.config.max_staleness]
        if self.config.on_stale == "drop":
            stale += [p for p in self.groups if p not in stale and any(map(self.at_last_segment, self.groups[p]))]
        self.leave(stale, "stale")
        self.pool.expire(self.version)

    @rule(before_taking=st.booleans())
    def finish_overdue(self, before_taking):
        expected = []
        for prompt in list(self.groups) if self.config.on_stale == "finish" else []:
            last_chance = before_taking and self.version - self.oldest(prompt) >= self.config.max_staleness
            found = [
                (prompt, i)
                for i, response in enumerate(self.groups[prompt])
                if not response["outcome"] and (last_chance or self.at_last_segment(response))
            ]
            if all(self.groups[prompt][i]["tokens"] for _, i in found):
                expected += found
            else:
                self.leave([prompt], "stale")
        found = self.pool.overdue(self.version if before_taking else None)
        assert sorted((group.prompt, group.responses.index(response)) for group, response in found) == expected
        for prompt, i in expected:
            self.groups[prompt][i]["outcome"] = {"reward": 0.0, "truncated": True}
        for _, response in found:
            self.pool.grow(response, [], [], [], {"reward": 0.0, "truncated": True})
        self.counts["finished"] += len(expected)

    @rule(num_groups=st.integers(0, 4))
    def take(self, num_groups):
        self.expire(0)
        complete = sorted(filter(self.is_complete, self.groups), key=lambda prompt: (self.oldest(prompt), prompt))
        taken = self.pool.take(num_groups)
        assert [group.prompt for group in taken] == complete[:num_groups]  # the oldest first
        for group in taken:
            assert self.version - group.oldest_version <= self.config.max_staleness
            assert group.num_tokens == sum(len(response["tokens"]) for response in self.groups[group.prompt])
            self.check_content(group)
            self.segments += [len(response.segments) for response in group.responses]
        self.leave(complete[:num_groups], "taken")

    @rule(data=st.data(), reason=st.sampled_from(REASONS[1:]))
    @precondition(lambda self: self.groups)
    def drop(self, data, reason):
        group = data.draw(st.sampled_from(self.pool.unfinished + self.pool.complete))
        self.leave([group.prompt], reason)
        self.pool.drop(group, reason)

    @rule(shift=st.integers(-3, 3), exhausted=st.booleans())
    def save_load_and_shift_versions(self, shift, exhausted):
        self.pool.exhausted = exhausted
        self.pool.save(self.directory / "pool", {"version": self.version}, FINGERPRINT)
        assert {file.name for file in (self.directory / "pool").iterdir()} == {"groups.safetensors", "pool.json"}
        self.pool, state = PartialPool.load(self.directory / "pool", self.config, FINGERPRINT)
        assert (state, self.pool.exhausted) == ({"version": self.version}, exhausted)
        self.pool.shift_versions(shift)
        self.version += shift
        for response in (response for group in self.groups.values() for response in group):
            response["tokens"] = [(version + shift, segment) for version, segment in response["tokens"]]
        for group in self.pool.unfinished + self.pool.complete:
            self.check_content(group)

    @precondition(lambda self: hasattr(self, "pool"))
    @invariant()
    def nothing_is_lost_and_nothing_is_there_twice(self):
        held = [group.prompt for group in self.pool.unfinished + self.pool.complete]
        in_order = sorted(self.groups, key=lambda prompt: (self.is_complete(prompt), self.oldest(prompt), prompt))
        assert held == in_order and len(self.pool) == len(held)
        metrics = self.pool.metrics()
        for name in ("started", "taken", "resumed", "finished", "tokens_wasted"):
            assert metrics[f"partial/{name}"] == self.counts[name], name
        for reason in REASONS:
            assert metrics[f"partial/dropped_{reason}"] == self.counts[reason], reason
        assert metrics["partial/dropped"] == sum(self.counts[reason] for reason in REASONS)
        assert metrics["partial/waiting"] == sum(map(self.is_complete, self.groups))
        assert metrics["partial/in_flight"] == len(self.groups) - metrics["partial/waiting"]
        if self.segments:
            assert metrics["partial/segments_max"] == max(self.segments)
            assert metrics["partial/segments_mean"] == sum(self.segments) / len(self.segments)
        else:
            assert "partial/segments_max" not in metrics
        self.totals.update(self.counts)
        left = self.totals["taken"] + sum(self.totals[reason] for reason in REASONS)
        assert self.totals["started"] - left == len(self.pool)
        self.counts.clear()
        self.segments.clear()


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(token_budget=-1), "token_budget -1 is not allowed; it must be at least 0"),
        (dict(max_segments=-1), "max_segments -1 is not allowed; it must be at least 0"),
        (dict(max_staleness=-1), "max_staleness -1 is not allowed; it must be at least 0"),
        (dict(oversample=0.9), "oversample 0.9 is not allowed; it must be at least 1"),
        (dict(oversample=math.inf), "oversample inf is not allowed; it must be at least 1"),
        (dict(on_stale="keep"), f"on_stale 'keep' is not allowed; it must be one of {ON_STALE}"),
    ],
)
def test_invalid_settings_are_refused_with_field_value_and_range(settings, message):
    with pytest.raises(ValueError) as refused:
        PartialConfig(**settings)
    assert str(refused.value) == message


def save(path) -> None:
    pool = PartialPool(PartialConfig())
    pool.grow(pool.start("a", None, 1).responses[0], [1, 2], [-0.5, -1.5], [3, 3])
    pool.save(path, None, FINGERPRINT)


def test_a_saved_pool_keeps_the_names_of_its_columns(tmp_path):
    save(tmp_path / "pool")
    names = {"tokens:int32", "log_probs:float32", "versions:int32"}
    columns = load_file(tmp_path / "pool" / "groups.safetensors")
    assert columns.keys() == {f"{kind}/{name}" for kind in ("values", "lengths") for name in names}


def test_a_pool_of_another_format_is_refused_with_the_flag_that_starts_without_it(tmp_path):
    save(tmp_path / "pool")
    (tmp_path / "pool" / "pool.json").write_text("[]")
    with pytest.raises(SavedStateError, match=r"format version None.* reads 1; .*--partial.discard_saved to start"):
        PartialPool.load(tmp_path / "pool", PartialConfig(), FINGERPRINT)
