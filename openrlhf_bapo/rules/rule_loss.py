"""A clip rule in training: its updates, their metrics, and the time that they cost."""

import functools
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from openrlhf_bapo.offpolicy.offpolicy_metrics import OffPolicyTally, offpolicy_metrics, tally_offpolicy
from openrlhf_bapo.rules.bounds_metrics import bounds_metrics
from openrlhf_bapo.rules.clip_bounds import ContributionTally
from openrlhf_bapo.rules.clip_rules import ClipRule, Tokens, UpdateBounds
from openrlhf_bapo.rules.entropy_rule import EntropyRule


class RuleUpdates:
    """The updates of a clip rule in one training process, and their metrics.

    Args:
        rule: the clip rule.
        group: data-parallel ranks whose tokens count together; None: this process alone.
    """

    def __init__(self, rule: ClipRule, group: dist.ProcessGroup | None = None) -> None:
        self.rule, self.group = rule, group
        self.updates: list[UpdateBounds] = []
        """Every closed update since `updates` was last emptied, for the metrics."""
        self.entropy_rule = EntropyRule()
        """Tallies every call of the loss; the caller closes its updates, which end with the optimizer step."""
        self._offpolicy_tally: OffPolicyTally | None = None

    def close_update(self, is_skipped: bool = False) -> None:
        """Close the running update; every rank must call.

        Args:
            is_skipped: as in `ClipRule.close_update`.
        """
        self.updates.append(self.rule.close_update(self._all_reduce, is_skipped))

    def tally_offpolicy(
        self, tokens: Tokens, staleness: torch.Tensor | None = None, optimizer_steps: torch.Tensor | None = None
    ) -> None:
        """Tally a micro-batch that the loss is about to train on, by the rule's bounds, for `offpolicy_metrics`.

        `staleness` and `optimizer_steps` are those of `tally_offpolicy` (offpolicy/offpolicy_metrics.py).
        """
        values = tokens.ratio, tokens.advantages, tokens.weight, staleness, optimizer_steps
        part = tally_offpolicy(*values, *self.rule.bounds(tokens))
        self._offpolicy_tally = part if self._offpolicy_tally is None else self._offpolicy_tally + part

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of all that was closed and tallied since the last call; every rank must call.

        Those of the bounds and of the entropy rule are means over the updates.
        """
        metrics = self.take_bounds_metrics() | self.entropy_rule.take_metrics(self._sum_over_ranks)
        if self._offpolicy_tally is None:
            return metrics
        tally, self._offpolicy_tally = self._offpolicy_tally, None
        return metrics | offpolicy_metrics(tally if self.group is None else tally.all_reduce(self.group))

    def take_bounds_metrics(self) -> dict[str, float]:
        """Return `bounds_metrics` of the updates that were closed since the last call."""
        updates, self.updates = self.updates, []
        return bounds_metrics(updates) if updates else {}

    def _sum_over_ranks(self, tallies: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(tallies, group=self.group)
        return tallies

    def _all_reduce(self, tally: ContributionTally) -> ContributionTally:
        return tally if self.group is None else tally.all_reduce(self.group)


class ClipRuleLoss(RuleUpdates):
    """Base of a framework's policy loss that clips ratios to [1 - clip_eps_low, 1 + clip_eps_high].

    For a rule that needs the tally first, call `tally_tokens` and `close_update` before the update is trained; without
    these calls, every call of the loss closes an update of its own tokens (micro-batch scope). With any other rule,
    every call of the loss tallies its tokens; call `close_update` after the update is trained.
    """

    clip_eps_low: float | torch.Tensor
    clip_eps_high: float | torch.Tensor
    dual_clip: float | None

    def __init__(self, rule: ClipRule, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(rule, group)
        self._is_tallied = False  # whether the caller has tallied the coming update
        self._timers: list[Timer] = []

    def tally_tokens(self, tokens: Tokens) -> None:
        """Add the tokens of one micro-batch to the running update."""
        with self._timed():
            self.rule.tally(tokens)

    def close_update(self, is_skipped: bool = False) -> None:
        """Close the running update, if anything was tallied; every rank must call."""
        if not self.rule.has_open_update:
            return
        with self._timed():
            super().close_update(is_skipped)
        self._is_tallied = self.rule.needs_tally_first

    def search_in_each_call(self) -> None:
        """Let a rule that needs the tally first close an update in each call, until `close_update` is called."""
        self._is_tallied = False

    def _set_bounds(self, tokens: Tokens, of_the_loss: Tokens) -> torch.Tensor | None:
        """Set the bounds that the loss clips these tokens to; returns the weights of a rule that has weights.

        Args:
            tokens: of the micro-batch that the loss is called with.
            of_the_loss: the same tokens with their weights in the loss, which may differ from those in the share.
        """
        if not self._is_tallied:
            with self._timed():
                self.rule.tally(tokens)
                if self.rule.needs_tally_first:
                    super().close_update()
        self.entropy_rule.tally(self.rule, of_the_loss, self.dual_clip)
        weights = self.rule.weights(tokens)
        if weights is None:
            lower, upper = self.rule.bounds(tokens)
            # The loss clamps to (1 - low, 1 + high), which is exactly (lower, upper) again in float64.
            self.clip_eps_low, self.clip_eps_high = 1 - lower, upper - 1
        else:
            self.clip_eps_low, self.clip_eps_high = 1.0, math.inf
        return weights

    def take_seconds(self) -> float:
        """Return the seconds of tallies and searches since the last call, the wait for other ranks included."""
        timers, self._timers = self._timers, []
        return sum(timer.seconds() for timer in timers)

    def _timed(self) -> "Timer":
        self._timers.append(timer := Timer())
        return timer


def leave_out_nonfinite(
    action_mask: torch.Tensor, *values: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Mask the tokens that have a value that is not finite.

    If all values are finite, the results are the arguments, bit for bit. Nothing is read on the host.

    Args:
        action_mask: [batch, actions], 1 for the response's tokens.
        values: each [batch, actions].

    Returns:
        The mask without these tokens, the values with zeros there, and the number of these tokens.
    """
    finite = functools.reduce(torch.logical_and, map(torch.isfinite, values))
    num_left_out = ((action_mask > 0) & ~finite).sum()
    return action_mask * finite, [torch.where(finite, value, 0.0) for value in values], num_left_out


_has_cuda = functools.cache(torch.cuda.is_available)  # cached, because every call asks the driver


class Timer:
    """Seconds that a device spends in a `with` block. Only `seconds` waits for the GPU, so call it late."""

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_: object) -> None:
        self._end = self._now()

    def seconds(self) -> float:
        """Return the measured time. Waits for the device."""
        if isinstance(self._start, float):
            return self._end - self._start
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000

    @staticmethod
    def _now() -> Any:
        """Return a time in seconds, or an event where there is CUDA."""
        if not _has_cuda():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
