"""Responses that grow over several rollouts, by at most a token budget in each, and their prompt groups.

The unit is the prompt group: all responses to one prompt. They are trained on together, because advantages are relative
to the group. A policy version is the number of weight updates published to the rollout engines so far. The life of a
group is

                         +--------- resumed by the next rollout ----------+
                         v                                                |
    started ----> unfinished ----> some response has spent its budget ----+
                    |   |
                    |   +--> every response complete ----> waits ----> taken: trained on, once
                    |                                        |
                    +----------------------------------------+--> dropped: stale, filtered, left over,
                                                                      unrewarded

and every way out is counted, so that started = taken + dropped + size. A response grows by one segment per rollout.
Every token has the log-prob that the engine sampled it with, and the version that generated it. A group's staleness at
version v is v minus the version of its oldest token. Groups above `max_staleness` are never taken.

Example with a budget of 100 tokens and max_staleness 1: a response of 250 tokens, started at version 3, has 100 tokens
after the rollout of version 3, 200 after that of version 4, and would be complete at version 5. `on_stale="finish"`
finishes it at version 4 as truncated, with its 200 tokens. "drop" drops its group at version 5.

offpolicy/saved_pool.py describes the files of a saved pool.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from openrlhf_bapo.offpolicy.replay_pool import NO_VERSION
from openrlhf_bapo.offpolicy.saved_pool import from_columns, read_directory, to_columns, write_directory

ON_STALE = ("drop", "finish")
FORMAT_VERSION = 1
DISCARD_FLAG = "--partial.discard_saved"

REASONS = ("stale", "filtered", "left_over", "unrewarded")
"""Why a group was dropped: it was too old or had too many segments; dynamic filtering rejected its scores; it was in an
incomplete batch at the end of the data; a response got no reward."""

_COUNTERS = ("started", "taken", "resumed", "finished", "tokens_wasted", *REASONS)


@dataclass(frozen=True)
class PartialConfig:
    """Settings of rollouts under a token budget: growth per rollout, and limits on age."""

    token_budget: int = 0
    """The maximum number of tokens that a response grows by in one rollout; 0 = off."""

    oversample: float = 1.5
    """Groups in flight per group that a rollout still needs."""

    max_segments: int = 0
    """The maximum number of segments of a response; 0 = no limit."""

    max_staleness: int = 8
    """The highest staleness of a group that is taken, in versions."""

    on_stale: str = "drop"
    """How to treat a response that would become too old, or exceed `max_segments`: "drop" drops its group, "finish"
    ends the response where it is, as truncated."""

    def __post_init__(self) -> None:
        """Raise ValueError with the field, its value and what is allowed."""
        for name in ("token_budget", "max_segments", "max_staleness"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is not allowed; it must be at least 0")
        if not (math.isfinite(self.oversample) and self.oversample >= 1):
            raise ValueError(f"oversample {self.oversample} is not allowed; it must be at least 1")
        if self.on_stale not in ON_STALE:
            raise ValueError(f"on_stale {self.on_stale!r} is not allowed; it must be one of {ON_STALE}")


@dataclass(eq=False)
class Response:
    """One response so far."""

    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """[T] int32."""

    behavior_log_probs: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    """[T] float32: the log-probs that the engine sampled the tokens with."""

    versions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """[T] int32: the policy versions that generated the tokens."""

    segments: list[int] = field(default_factory=list)
    """Number of tokens in each segment; their sum is T."""

    outcome: dict | None = None
    """Properties of the whole response, such as its reward; any JSON values. None while it is unfinished."""

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return sum(self.segments)


@dataclass(eq=False)
class Group:
    """All responses to one prompt."""

    key: int
    """Number in the order of the starts, unique in a pool."""

    prompt: str

    label: object
    """The label that the reward compares with; any JSON value."""

    responses: list[Response]

    prompt_tokens: list[int] = field(default_factory=list)
    """Tokens of the prompt as the engine received it; [] while no response has grown."""

    @property
    def unfinished(self) -> list[Response]:
        """Responses that still grow."""
        return [response for response in self.responses if response.outcome is None]

    @property
    def outcomes(self) -> list[dict]:
        """Outcomes of the responses that are complete."""
        return [response.outcome for response in self.responses if response.outcome is not None]

    @property
    def oldest_version(self) -> int:
        """The lowest version that generated a token; `NO_VERSION` if there is no token."""
        grown = [response.versions for response in self.responses if response.num_tokens]
        return min((int(versions.min()) for versions in grown), default=NO_VERSION)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all responses."""
        return sum(response.num_tokens for response in self.responses)


class PartialPool:
    """Groups that were started, and are neither taken nor dropped yet."""

    def __init__(self, config: PartialConfig):
        self.config = config
        self.exhausted = False
        """Whether all prompts of the current episode have been started."""
        self._groups: dict[int, Group] = {}  # by key
        self._next_key = 0
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._segments: list[int] = []  # number of segments of each response that was taken

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def unfinished(self) -> list[Group]:
        """Groups with a response that still grows, the oldest first."""
        return self._sorted(lambda group: group.unfinished)

    @property
    def complete(self) -> list[Group]:
        """Groups whose responses are all complete and wait to be taken, the oldest first."""
        return self._sorted(lambda group: not group.unfinished)

    def start(self, prompt: str, label: object, num_samples: int) -> Group:
        """Start a new group, whose responses have no tokens yet."""
        group = Group(self._next_key, prompt, label, [Response() for _ in range(num_samples)])
        self._groups[group.key] = group
        self._next_key += 1
        self._counters["started"] += 1
        return group

    def grow(
        self,
        response: Response,
        tokens: list[int],
        behavior_log_probs: list[float],
        versions: list[int],
        outcome: dict | None = None,
    ) -> None:
        """Append the n tokens of one rollout to an unfinished response. They are one segment, if n is above 0.

        `outcome` is that of the whole response, if it ends with these tokens.
        """
        if tokens:
            self._counters["resumed"] += bool(response.segments)
            response.tokens = _extended(response.tokens, tokens)
            response.behavior_log_probs = _extended(response.behavior_log_probs, behavior_log_probs)
            response.versions = _extended(response.versions, versions)
            response.segments.append(len(tokens))
        response.outcome = outcome

    def restart(self, response: Response) -> None:
        """Discard the tokens of a response, so that it grows from its first token again."""
        self._counters["tokens_wasted"] += response.num_tokens
        response.tokens, response.versions = response.tokens[:0], response.versions[:0]
        response.behavior_log_probs = response.behavior_log_probs[:0]
        response.segments, response.outcome = [], None

    def expire(self, version: int) -> None:
        """Drop groups that are too old at `version`, and with "drop" also groups with a response at `max_segments`."""
        drops = self.config.on_stale == "drop"
        for group in list(self._groups.values()):
            too_old = version - group.oldest_version > self.config.max_staleness
            if too_old or (drops and any(map(self._is_at_last_segment, group.unfinished))):
                self.drop(group, "stale")

    def overdue(self, version: int | None = None) -> list[tuple[Group, Response]]:
        """Return the unfinished responses at `max_segments`, which "finish" ends as truncated; [] with "drop".

        A group is dropped instead if one of these responses has no tokens.

        Args:
            version: the version at which groups are taken next. If given, unfinished responses whose group would be too
                old at the version after it are returned too.
        """
        found = []
        for group in self.unfinished if self.config.on_stale == "finish" else []:
            last_chance = version is not None and version - group.oldest_version >= self.config.max_staleness
            responses = [r for r in group.unfinished if last_chance or self._is_at_last_segment(r)]
            if all(response.num_tokens for response in responses):
                found += [(group, response) for response in responses]
            else:
                self.drop(group, "stale")
        self._counters["finished"] += len(found)
        return found

    def take(self, num_groups: int) -> list[Group]:
        """Remove up to `num_groups` complete groups, the oldest first, and return them to be trained on."""
        taken = self.complete[:num_groups]
        for group in taken:
            del self._groups[group.key]
            self._segments += [len(response.segments) for response in group.responses]
        self._counters["taken"] += len(taken)
        return taken

    def drop(self, group: Group, reason: str) -> None:
        """Remove a group without training on it, for one of `REASONS`."""
        del self._groups[group.key]
        self._counters[reason] += 1
        self._counters["tokens_wasted"] += group.num_tokens

    def metrics(self) -> dict[str, float]:
        """Return the pool's current sizes, and the counts and the taken responses' segments since the last call.

        Returns:
            "partial/" in_flight and waiting (unfinished and complete groups), started, taken, dropped (all reasons)
            and dropped_REASON (groups), resumed and finished (responses), tokens_wasted (of dropped groups and
            restarted responses), segments_mean and segments_max (only if responses were taken).
        """
        counted = self._counters
        found: dict[str, float] = {
            "in_flight": len(self.unfinished),
            "waiting": len(self.complete),
            **{name: counted[name] for name in _COUNTERS if name not in REASONS},
            "dropped": sum(counted[reason] for reason in REASONS),
            **{f"dropped_{reason}": counted[reason] for reason in REASONS},
        }
        if self._segments:
            found["segments_mean"] = sum(self._segments) / len(self._segments)
            found["segments_max"] = max(self._segments)
        self._counters, self._segments = dict.fromkeys(_COUNTERS, 0), []
        return {f"partial/{name}": float(value) for name, value in found.items()}

    def save(self, path: str | os.PathLike, state: object, fingerprint: dict[str, str]) -> None:
        """Write the pool as `ReplayPool.save` does."""
        groups = [
            vars(group) | {"responses": [{"segments": r.segments, "outcome": r.outcome} for r in group.responses]}
            for group in self._groups.values()
        ]
        record = {
            "format_version": FORMAT_VERSION,
            "state": state,
            "fingerprint": fingerprint,
            "exhausted": self.exhausted,
            "next_key": self._next_key,
            "counters": self._counters,
            "segments": self._segments,
            "groups": groups,
        }
        # The column of the log-probs has another name than the field.
        tensors = [
            {"tokens": r.tokens, "log_probs": r.behavior_log_probs, "versions": r.versions}
            for group in self._groups.values()
            for r in group.responses
        ]
        write_directory(path, to_columns(tensors), record)

    @classmethod
    def load(
        cls, path: str | os.PathLike, config: PartialConfig, fingerprint: dict[str, str]
    ) -> tuple["PartialPool", Any]:
        """Load the pool as `ReplayPool.load` does, and raise what it raises; `config` may differ."""
        columns, record = read_directory(path, FORMAT_VERSION, fingerprint, f"pass {DISCARD_FLAG}")
        pool = cls(config)
        pool.exhausted = record["exhausted"]
        pool._next_key, pool._segments = record["next_key"], record["segments"]
        pool._counters |= record["counters"]
        tensors = iter(from_columns(columns, sum(len(group["responses"]) for group in record["groups"])))
        for saved in record["groups"]:
            responses = []
            for response in saved.pop("responses"):
                row = next(tensors)
                responses.append(Response(row["tokens"], row["log_probs"], row["versions"], **response))
            pool._groups[saved["key"]] = Group(responses=responses, **saved)
        return pool, record["state"]

    def shift_versions(self, shift: int) -> None:
        """Add `shift` to the version of every token. A resumed run needs this, because its engines count from 0."""
        for group in self._groups.values():
            for response in group.responses:
                response.versions += shift

    def _is_at_last_segment(self, response: Response) -> bool:
        return 0 < self.config.max_segments <= len(response.segments)

    def _sorted(self, belongs: Callable[[Group], object]) -> list[Group]:
        groups = [group for group in self._groups.values() if belongs(group)]
        return sorted(groups, key=lambda group: (group.oldest_version, group.key))


def _extended(tensor: torch.Tensor, values: list) -> torch.Tensor:
    return torch.cat([tensor, torch.tensor(values, dtype=tensor.dtype)])
