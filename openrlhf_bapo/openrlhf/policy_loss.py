"""OpenRLHF's PolicyLoss between the bounds, or with the weights, of a clip rule."""

import functools
import inspect
import math
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.models import PolicyLoss
from openrlhf.models.utils import masked_mean

from openrlhf_bapo.core.bounds_metrics import bounds_metrics
from openrlhf_bapo.core.clip_bounds import ContributionTally
from openrlhf_bapo.core.clip_config import ClipConfig
from openrlhf_bapo.core.clip_rules import ClipRule, Tokens, UpdateBounds, make_clip_rule, share_weights
from openrlhf_bapo.core.entropy_rule import EntropyRule
from openrlhf_bapo.openrlhf.settings import TOKEN_WEIGHTS


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


def correction_weights(
    loss: PolicyLoss, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, action_mask: torch.Tensor
) -> torch.Tensor:
    """Return each token's weight by OpenRLHF's IS correction, as `PolicyLoss.forward` computes it inside.

    Args:
        loss: its settings count; its level is not "off".
        old_log_probs: [batch, actions], log-probs that the ratio is taken against.
        rollout_log_probs: [batch, actions], the engine's.
        action_mask: [batch, actions], 1 for the response's tokens.

    Returns:
        [batch, actions], at least 0.
    """
    low, high = loss.is_correction_threshold
    log_ratio = old_log_probs - rollout_log_probs
    if loss.is_correction_mode == "clip":  # of tokens' ratios alone
        return log_ratio.exp().clamp(low, high)
    p, q = (log_probs.exp().clamp(1e-6, 1 - 1e-6) for log_probs in (rollout_log_probs, old_log_probs))
    gated = {
        "ratio": log_ratio,
        "binary_kl": p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log(),
        "tv": (p - q).abs(),
    }[loss.is_correction_gating]
    if loss.is_correction_level == "seq":
        gated = masked_mean(gated, action_mask, dim=-1).unsqueeze(-1)
    if loss.is_correction_gating == "ratio":
        gated = gated.exp()
    return torch.where((gated >= low) & (gated <= high), log_ratio.exp(), 0.0)


class BapoPolicyLoss(PolicyLoss):
    """The clipped surrogate of `PolicyLoss` (openrlhf/models/loss.py) between the bounds of a clip rule.

    With a rule that gives weights, the loss is -w A log pi per token, without a clip.

    Dual clip, IS correction, aggregation and the five results are OpenRLHF's own. A token counts in the search with its
    weight in the loss, IS correction included. A rule that needs the tally of an
    update first gets it from `tally` and `close_update` before the update is trained; without them, every call closes
    an update of the tokens that it is given, summed over `group` (micro-batch scope). With any other rule, every call
    tallies its tokens, and `close_update` closes an update that has been trained.

    Args:
        clip_config: BAPO's settings. Its `dual_clip` has no effect here: `PolicyLoss` has an argument of this name.
        rule: a clip rule in place of BAPO's with `clip_config`.
        token_weight: "none", or "rollout_prob" to weight a token in the search by pi_behavior(token). The paper writes
            Eq. 8 with that weight. Over sampled tokens it counts the probability twice, so it is not the default.
        group: data-parallel ranks whose tokens count together; None: this process alone.
        **kwargs: `PolicyLoss`'s own arguments. Its `clip_eps_low` and `clip_eps_high` are overwritten.

    Raises:
        ValueError: for a `policy_loss_type` other than "ppo" (a rule bounds each token's ratio, gspo has one ratio per
            sequence), or an unknown `token_weight`.
    """

    clip_eps_low: float | torch.Tensor
    clip_eps_high: float | torch.Tensor

    def __init__(
        self,
        *args: Any,
        clip_config: ClipConfig | None = None,
        rule: ClipRule | None = None,
        token_weight: str = "none",
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.policy_loss_type != "ppo":
            raise ValueError(f"policy_loss_type {self.policy_loss_type!r} has no token ratio to bound; use 'ppo'")
        if token_weight not in TOKEN_WEIGHTS:
            raise ValueError(f"token_weight {token_weight!r} is not allowed; it must be one of {TOKEN_WEIGHTS}")
        self.rule = rule or make_clip_rule(clip_config or ClipConfig())
        self.token_weight = token_weight
        self.group = group
        self.updates: list[UpdateBounds] = []
        """Every closed update since `updates` was last emptied, for the metrics."""
        self.entropy_rule = EntropyRule()
        """Tallies every call; the caller closes its updates, which end with the optimizer step."""
        self._is_tallied = False  # by the caller, for the coming update
        self._timers: list[Timer] = []

    @classmethod
    def from_policy_loss(cls, loss: PolicyLoss, **kwargs: Any) -> "BapoPolicyLoss":
        """Return the same loss with a clip rule; upstream keeps every argument under its own name."""
        arguments = {name: getattr(loss, name) for name in inspect.signature(PolicyLoss).parameters}
        return cls(**arguments, **kwargs)

    def tally(
        self,
        log_probs: torch.Tensor,
        behavior_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor | None = None,
    ) -> None:
        """Add one micro-batch to the running update.

        Args:
            log_probs: [batch, actions], log pi_theta.
            behavior_log_probs: [batch, actions], log-probs that the ratio is taken against.
            advantages: [batch, actions].
            action_mask: [batch, actions], 1 for the response's tokens.
            rollout_log_probs: [batch, actions], the engine's, for IS correction.
        """
        with self._timed():
            self.rule.tally(self._tokens(log_probs, behavior_log_probs, advantages, action_mask, rollout_log_probs))

    def close_update(self) -> None:
        """Close the running update, if anything was tallied; every rank must call."""
        if not self.rule.has_open_update:
            return
        with self._timed():
            self.updates.append(self.rule.close_update(self._all_reduce))
        self._is_tallied = self.rule.needs_tally_first

    def search_in_each_call(self) -> None:
        """Let a rule that needs the tally first close an update in each call, until `close_update` is called."""
        self._is_tallied = False

    def forward(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        rollout_log_probs: torch.Tensor | None = None,
        **loss_batch_info: Any,
    ) -> tuple:
        """Return (loss, clip ratio, ppo kl, vllm kl, IS filter ratio), with the shapes of `PolicyLoss.forward`."""
        mask = torch.ones_like(log_probs) if action_mask is None else action_mask
        tokens = self._tokens(log_probs, old_log_probs, advantages, mask, rollout_log_probs)
        if not self._is_tallied:
            with self._timed():
                self.rule.tally(tokens)
                if self.rule.needs_tally_first:
                    self.updates.append(self.rule.close_update(self._all_reduce))
        of_the_loss = tokens
        if self.token_weight != "none":
            of_the_loss = replace(tokens, weight=self._weight(old_log_probs, mask, rollout_log_probs))
        self.entropy_rule.tally(self.rule, of_the_loss, self.dual_clip)
        weights = self.rule.weights(tokens)
        if weights is None:
            lower, upper = self.rule.bounds(tokens)
            # PolicyLoss clamps to (1 - low, 1 + high); the way there and back is exact in float64.
            self.clip_eps_low, self.clip_eps_high = 1 - lower, upper - 1
            return super().forward(
                log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, **loss_batch_info
            )
        # At ratio 1 the surrogate of advantages w A has the gradient of w A log pi.
        self.clip_eps_low, self.clip_eps_high = 1.0, math.inf
        if rollout_log_probs is not None:  # IS correction stays old / rollout
            rollout_log_probs = rollout_log_probs + (log_probs.detach() - old_log_probs)
        loss, clip_ratio, _, vllm_kl, filtered = super().forward(
            log_probs, log_probs.detach(), weights * advantages, action_mask, rollout_log_probs, **loss_batch_info
        )
        ppo_kl = masked_mean(old_log_probs - log_probs.detach(), action_mask, dim=None)
        return loss, clip_ratio, ppo_kl, vllm_kl, filtered

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the updates that were closed since the last call, averaged over them."""
        updates, self.updates = self.updates, []
        return (bounds_metrics(updates) if updates else {}) | self.entropy_rule.take_metrics(self._sum_over_ranks)

    def take_seconds(self) -> float:
        """Return the seconds of tallies and searches since the last call, the wait for other ranks included."""
        timers, self._timers = self._timers, []
        return sum(timer.seconds() for timer in timers)

    def _tokens(
        self,
        log_probs: torch.Tensor,
        behavior_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor | None,
    ) -> Tokens:
        weight = self._weight(behavior_log_probs, action_mask, rollout_log_probs)
        if self.token_weight == "rollout_prob":
            if self.is_correction_level != "off" and rollout_log_probs is not None:
                behavior = rollout_log_probs
            else:
                behavior = behavior_log_probs
            weight = weight * behavior.exp()
        return Tokens(log_probs.detach(), behavior_log_probs, advantages, weight)

    def _weight(
        self, behavior_log_probs: torch.Tensor, action_mask: torch.Tensor, rollout_log_probs: torch.Tensor | None
    ) -> torch.Tensor:
        """Return each token's weight in the loss, IS correction included."""
        weight = share_weights(action_mask, self.rule.config, "update" if self.token_level_loss else "sequence")
        if self.is_correction_level == "off":
            return weight
        assert rollout_log_probs is not None, "IS correction needs the engine's log-probs"
        return weight * correction_weights(self, behavior_log_probs, rollout_log_probs, action_mask)

    def _sum_over_ranks(self, tallies: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(tallies, group=self.group)
        return tallies

    def _all_reduce(self, tally: ContributionTally) -> ContributionTally:
        return tally if self.group is None else tally.all_reduce(self.group)

    def _timed(self) -> "Timer":
        self._timers.append(timer := Timer())
        return timer


_has_cuda = functools.cache(torch.cuda.is_available)  # which asks the driver every time


class Timer:
    """Seconds that a device spends in a `with` block; read late, it stalls no GPU on the way."""

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
