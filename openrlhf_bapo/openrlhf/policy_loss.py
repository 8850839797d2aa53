"""OpenRLHF's PolicyLoss with clip bounds that are found instead of fixed."""

import functools
import inspect
import time

import torch
import torch.distributed as dist
from openrlhf.models import PolicyLoss

from openrlhf_bapo.core.clip_bounds import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    solve_clip_bounds,
    tally_contributions,
)
from openrlhf_bapo.core.steady_bounds import SmoothingConfig, SteadyBounds
from openrlhf_bapo.openrlhf.settings import TOKEN_WEIGHTS


def leave_out_nonfinite(
    action_mask: torch.Tensor, *values: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """A mask without the tokens of which some value is not finite, the values with zeros there, and their number.

    Where all is finite the results are the arguments', bit for bit; nothing is read on the host.

    Args:
        action_mask: [batch, actions], 1 for the response's tokens.
        values: each [batch, actions].
    """
    finite = functools.reduce(torch.logical_and, map(torch.isfinite, values))
    num_left_out = ((action_mask > 0) & ~finite).sum()
    return action_mask * finite, [torch.where(finite, value, 0.0) for value in values], num_left_out


class BapoPolicyLoss(PolicyLoss):
    """The clipped surrogate of `PolicyLoss` (openrlhf/models/loss.py) between bounds from BAPO's search.

    Dual clip, IS correction, aggregation and the five results are OpenRLHF's own. The bounds are those set with
    `set_bounds` for the update; while none are set, every call finds its own from the tokens that it is given, summed
    over `group`. With `smoothing` they follow the updates before: every call tallies its tokens as it goes, and
    `end_update` closes an update.

    Args:
        clip_config: the search.
        smoothing: how slowly the bounds follow; None: found anew.
        token_weight: "none", or "rollout_prob" to weight a token in the search by pi_behaviour(token). The paper writes
            Eq. 8 with that weight; over sampled tokens it counts the probability twice, so it is not the default.
        group: data-parallel ranks whose tokens count together; None: this process alone.
        **kwargs: `PolicyLoss`'s own arguments. Its `clip_eps_low` and `clip_eps_high` are overwritten.

    Raises:
        ValueError: for a `policy_loss_type` other than "ppo" (BAPO bounds a token's ratio, gspo has a sequence's), or
            an unknown `token_weight`.
    """

    def __init__(
        self,
        *args,
        clip_config: ClipConfig,
        smoothing: SmoothingConfig | None = None,
        token_weight: str = "none",
        group: dist.ProcessGroup | None = None,
        **kwargs,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.policy_loss_type != "ppo":
            raise ValueError(f"policy_loss_type {self.policy_loss_type!r} has no token ratio to bound; use 'ppo'")
        if token_weight not in TOKEN_WEIGHTS:
            raise ValueError(f"token_weight {token_weight!r} is not allowed; it must be one of {TOKEN_WEIGHTS}")
        self.clip_config = clip_config
        self.token_weight = token_weight
        self.group = group
        self.found: list[ClipBounds] = []
        """Every search's result since `found` was last emptied, for the metrics."""
        self._bounds: ClipBounds | None = None
        self.steady = None if smoothing is None else SteadyBounds(clip_config, smoothing)
        self.used: list[ClipBounds] = []
        """With `smoothing`, what each update in `found` was trained with."""
        self._trained: ContributionTally | None = None
        self._timers: list[Timer] = []

    @classmethod
    def from_policy_loss(cls, loss: PolicyLoss, **kwargs) -> "BapoPolicyLoss":
        """The same loss with BAPO's bounds; upstream keeps every argument under its own name."""
        arguments = {name: getattr(loss, name) for name in inspect.signature(PolicyLoss).parameters}
        return cls(**arguments, **kwargs)

    def set_bounds(self, tally: ContributionTally | None) -> None:
        """Fix the bounds of the coming update from its tally over this rank; None: each call finds its own."""
        self._bounds = None if tally is None else self._search(tally)

    def tally(
        self, log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, action_mask: torch.Tensor
    ) -> ContributionTally:
        """What the search needs of one micro-batch.

        Args:
            log_probs: [batch, actions], log pi_theta.
            old_log_probs: [batch, actions], log pi of the behaviour policy.
            advantages: [batch, actions].
            action_mask: [batch, actions], 1 for the response's tokens.
        """
        with self._timed():
            tokens = self._tokens(log_probs, old_log_probs, advantages, action_mask)
            return tally_contributions(*tokens, self.clip_config)

    def _tokens(
        self, log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, action_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ratio, advantages and weights for a tally."""
        ratio = (log_probs.detach() - old_log_probs).clamp_(-20.0, 20.0).exp_()  # as PolicyLoss.forward does
        weight = action_mask
        # The share is one of the objective, where a sequence mean gives a token 1 / length. The released recipe, known
        # by its P / N target, counts tokens whatever the aggregation.
        if not self.token_level_loss and self.clip_config.target_kind == "share":
            weight = weight.to(ratio.dtype) / weight.sum(-1, keepdim=True).clamp(min=1)
        if self.token_weight == "rollout_prob":
            weight = weight * old_log_probs.exp()
        return ratio, advantages, weight

    def _timed(self) -> "Timer":
        self._timers.append(timer := Timer())
        return timer

    def take_seconds(self) -> float:
        """That tallies and searches took since the last call, the wait for other ranks in it."""
        timers, self._timers = self._timers, []
        return sum(timer.seconds() for timer in timers)

    def end_update(self) -> None:
        """With `smoothing`: let the bounds follow the update that has been trained, if any; every rank must call."""
        if self._trained is None:
            return
        tally, self._trained = self._trained, None
        with self._timed():
            used, found = self.steady.end_update(tally if self.group is None else tally.all_reduce(self.group))
        self.used.append(used)
        self.found.append(found)

    def forward(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        rollout_log_probs: torch.Tensor | None = None,
        **loss_batch_info,
    ) -> tuple:
        """As `PolicyLoss.forward`, shapes and results alike: (loss, clip ratio, ppo kl, vllm kl, IS filter ratio)."""
        bounds = self._bounds
        if bounds is None:
            mask = torch.ones_like(log_probs) if action_mask is None else action_mask
            if self.steady is None:
                bounds = self._search(self.tally(log_probs, old_log_probs, advantages, mask))
            else:
                bounds = self.steady
                with self._timed():
                    tally = self.steady.tally(*self._tokens(log_probs, old_log_probs, advantages, mask))
                self._trained = tally if self._trained is None else self._trained + tally
        # PolicyLoss clamps to (1 - low, 1 + high); the way there and back is exact in float64.
        lower, upper = bounds.lower, bounds.upper
        if log_probs.device.type == "cpu":
            # A clamp by numbers takes half as long as one by tensors; on a GPU reading them would wait for it.
            lower, upper = lower.item(), upper.item()
        self.clip_eps_low, self.clip_eps_high = 1 - lower, upper - 1
        return super().forward(log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, **loss_batch_info)

    def _search(self, tally: ContributionTally) -> ClipBounds:
        with self._timed():
            if self.group is not None:
                tally = tally.all_reduce(self.group)
            bounds = solve_clip_bounds(tally, self.clip_config)
        self.found.append(bounds)
        return bounds


_has_cuda = functools.cache(torch.cuda.is_available)  # which asks the driver every time


class Timer:
    """Seconds that a device spends in a `with` block; read late, it stalls no GPU on the way."""

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *_) -> None:
        self._end = self._now()

    def seconds(self) -> float:
        if isinstance(self._start, float):
            return self._end - self._start
        self._end.synchronize()
        return self._start.elapsed_time(self._end) / 1000

    @staticmethod
    def _now() -> "float | torch.cuda.Event":
        if not _has_cuda():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
