"""Responses that grow over several rollouts, by a token budget each, and the prompt groups that they make up.

The unit is the prompt group: all responses to one prompt, which are trained on together, so that group advantages stay
right. A policy version is the number of weight updates published to the rollout engines so far. The life of a group is

                         +--------- resumed by the next rollout ----------+
                         v                                                |
    started ----> unfinished ----> some response has spent its budget ----+
                    |   |
                    |   +--> every response complete ----> waits ----> taken: trained on, once
                    |                                        |
                    +----------------------------------------+--> dropped: stale, filtered, left over,
                                                                      unrewarded

and every way out is counted, so that started = taken + dropped + size. A response gets one segment a rollout: the
tokens that it grew by, each with the log-prob that the engine sampled it with and the version that generated it. A
group's staleness at version v is v less the version of its oldest token; none above `max_staleness` is ever taken.

Example with a budget of 100 tokens and max_staleness 1: a response of 250 tokens, begun at version 3, has 100 of them
at its end, 200 at version 4's, and would be complete at version 5. `on_stale="finish"` lets it be finished at version 4
as truncated, with its 200 tokens; "drop" drops its group at version 5.

On disk a pool is a directory as in replay_pool.py: groups.safetensors holds the tokens, pool.json the rest.
"""

import math
import os
from dataclasses import dataclass, field

import torch

from openrlhf_bapo.core.replay_pool import NO_VERSION, from_columns, read_directory, to_columns, write_directory

ON_STALE = ("drop", "finish")
FORMAT_VERSION = 1
DISCARD_FLAG = "--partial.discard_saved"

REASONS = ("stale", "filtered", "left_over", "unrewarded")
"""Why a group was dropped: too old or of too many segments; by its scores; in no whole batch at the end of the data;
with a response that got no reward."""

_TENSORS = {"tokens": torch.int32, "log_probs": torch.float32, "versions": torch.int32}
_COUNTERS = ("started", "taken", "resumed", "finished", "tokens_wasted", *REASONS)


@dataclass(frozen=True)
class PartialConfig:
    """How far a response grows in one rollout, and how old it may become."""

    token_budget: int = 0
    """Tokens that a response may grow by in one rollout; 0 = off."""

    oversample: float = 1.5
    """Groups in flight per group that a rollout still needs."""

    max_segments: int = 0
    """The most segments of a response; 0 = any number."""

    max_staleness: int = 8
    """The highest staleness of a group that is taken, in versions."""

    on_stale: str = "drop"
    """What becomes of a response that would grow too old, or beyond `max_segments`: "drop" drops its group, "finish"
    ends it where it is, as truncated."""

    def __post_init__(self):
        """Raises ValueError that names the field, its value and what is allowed."""
        for name in ("token_budget", "max_segments", "max_staleness"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)} is not allowed; it must be at least 0")
        if not (math.isfinite(self.oversample) and self.oversample >= 1):
            raise ValueError(f"oversample {self.oversample} is not allowed; it must be at least 1")
        if self.on_stale not in ON_STALE:
            raise ValueError(f"on_stale {self.on_stale!r} is not allowed; it must be one of {ON_STALE}")


def _empty() -> dict[str, torch.Tensor]:
    return {name: torch.empty(0, dtype=dtype) for name, dtype in _TENSORS.items()}


@dataclass(eq=False)
class Response:
    """One response so far."""

    tensors: dict[str, torch.Tensor] = field(default_factory=_empty)
    """"tokens" [T] int32, "log_probs" [T] float32 (the engine's, as sampled), "versions" [T] int32."""

    segments: list[int] = field(default_factory=list)
    """Tokens of each segment; their sum is T."""

    outcome: dict | None = None
    """What the whole response was found to be, any JSON values, such as its reward; None while it is unfinished."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.segments)


@dataclass(eq=False)
class Group:
    """All responses to one prompt."""

    key: int
    """Unique in a pool, ascending in the order of the start."""

    prompt: str

    label: object
    """What the reward compares with; any JSON value."""

    responses: list[Response]

    prompt_tokens: list[int] = field(default_factory=list)
    """Of the prompt as the engine was given it; [] while no response has grown."""

    @property
    def unfinished(self) -> list[Response]:
        """The responses that are to grow on."""
        return [response for response in self.responses if response.outcome is None]

    @property
    def oldest_version(self) -> int:
        """The lowest version that generated a token; 2**31 - 1 without a token."""
        grown = [response.tensors["versions"] for response in self.responses if response.num_tokens]
        return min((int(versions.min()) for versions in grown), default=NO_VERSION)

    @property
    def num_tokens(self) -> int:
        """Of all responses."""
        return sum(response.num_tokens for response in self.responses)


class PartialPool:
    """The groups that were started and neither taken nor dropped."""

    def __init__(self, config: PartialConfig):
        self.config = config
        self.exhausted = False
        """Whether the prompts of the running episode have all been started."""
        self._groups: dict[int, Group] = {}  # by key
        self._next_key = 0
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._segments: list[int] = []  # of every response that was taken

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def unfinished(self) -> list[Group]:
        """Groups with a response that is to grow on, the oldest first."""
        return self._sorted(lambda group: group.unfinished)

    @property
    def complete(self) -> list[Group]:
        """Groups that wait to be taken, the oldest first."""
        return self._sorted(lambda group: not group.unfinished)

    def start(self, prompt: str, label: object, num_samples: int) -> Group:
        """A new group, whose responses have no token yet."""
        group = Group(self._next_key, prompt, label, [Response() for _ in range(num_samples)])
        self._groups[group.key] = group
        self._next_key += 1
        self._counters["started"] += 1
        return group

    def grow(
        self,
        response: Response,
        tokens: list[int],
        log_probs: list[float],
        versions: list[int],
        outcome: dict | None = None,
    ) -> None:
        """Append what a rollout made of an unfinished response; without any token that is no segment.

        Args:
            response: of a group of this pool.
            tokens: [n], as `log_probs` and `versions`.
            outcome: of the whole response, if it is finished with these tokens.
        """
        if tokens:
            self._counters["resumed"] += bool(response.segments)
            new = dict(tokens=tokens, log_probs=log_probs, versions=versions)
            for name, dtype in _TENSORS.items():
                response.tensors[name] = torch.cat([response.tensors[name], torch.tensor(new[name], dtype=dtype)])
            response.segments.append(len(tokens))
        response.outcome = outcome

    def restart(self, response: Response) -> None:
        """Let a response grow from its first token again."""
        self._counters["tokens_wasted"] += response.num_tokens
        response.tensors, response.segments, response.outcome = _empty(), [], None

    def expire(self, version: int) -> None:
        """Drop the groups that can no longer be taken at `version`; those at max_segments too, unless they finish."""
        drops = self.config.on_stale == "drop"
        for group in list(self._groups.values()):
            too_old = version - group.oldest_version > self.config.max_staleness
            if too_old or (drops and any(map(self._is_at_last_segment, group.unfinished))):
                self.drop(group, "stale")

    def overdue(self, version: int | None = None) -> list[tuple[Group, Response]]:
        """With "finish", the responses that are to be finished as truncated: those that have all the segments they may.

        Args:
            version: before groups are taken at this version, also those that would be too old at the next one. A group
                with such a response that has no token to finish is dropped.
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
        """At most `num_groups` complete groups, the oldest first, which leave the pool to be trained on."""
        taken = self.complete[:num_groups]
        for group in taken:
            del self._groups[group.key]
            self._segments += [len(response.segments) for response in group.responses]
        self._counters["taken"] += len(taken)
        return taken

    def drop(self, group: Group, reason: str) -> None:
        """Let a group go untrained, for one of `REASONS`."""
        del self._groups[group.key]
        self._counters[reason] += 1
        self._counters["tokens_wasted"] += group.num_tokens

    def metrics(self) -> dict[str, float]:
        """Sizes of the pool now, segments of the responses taken, and what was counted since the last call.

        Returns:
            "partial/" in_flight and waiting (unfinished and complete groups), started, taken, dropped (all reasons)
            and dropped_REASON (groups), resumed and finished (responses), tokens_wasted (of groups that were dropped
            and responses that were restarted), segments_mean and segments_max (missing if no response was taken).
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
        """Write the pool to directory `path`, in place of what stands there; as `ReplayPool.save`.

        Args:
            path: the directory; its parents are made.
            state: of the run around the pool; any JSON value, handed back by `load`.
            fingerprint: what a later run must share to use the pool, such as model and tokenizer.
        """
        groups = [
            {
                "key": group.key,
                "prompt": group.prompt,
                "label": group.label,
                "prompt_tokens": group.prompt_tokens,
                "responses": [{"segments": r.segments, "outcome": r.outcome} for r in group.responses],
            }
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
        write_directory(path, to_columns([r.tensors for g in self._groups.values() for r in g.responses]), record)

    @classmethod
    def load(
        cls, path: str | os.PathLike, config: PartialConfig, fingerprint: dict[str, str]
    ) -> tuple["PartialPool", object]:
        """The pool that was saved to `path`, and the state that it was saved with; `config` may differ.

        Raises:
            ReplayPoolError: if a file is missing, damaged or of another format, or if the fingerprint differs.
        """
        columns, record = read_directory(path, FORMAT_VERSION, fingerprint, DISCARD_FLAG)
        pool = cls(config)
        pool.exhausted = record["exhausted"]
        pool._next_key, pool._segments = record["next_key"], record["segments"]
        pool._counters |= record["counters"]
        rows = iter(from_columns(columns, sum(len(group["responses"]) for group in record["groups"])))
        for saved in record["groups"]:
            responses = [Response(next(rows), **response) for response in saved.pop("responses")]
            pool._groups[saved["key"]] = Group(responses=responses, **saved)
        return pool, record["state"]

    def shift_versions(self, shift: int) -> None:
        """Add `shift` to the version of every token: a resumed run's engines count from 0 again."""
        for group in self._groups.values():
            for response in group.responses:
                response.tensors["versions"] += shift

    def _is_at_last_segment(self, response: Response) -> bool:
        return 0 < self.config.max_segments <= len(response.segments)

    def _sorted(self, belongs) -> list[Group]:
        groups = [group for group in self._groups.values() if belongs(group)]
        return sorted(groups, key=lambda group: (group.oldest_version, group.key))
