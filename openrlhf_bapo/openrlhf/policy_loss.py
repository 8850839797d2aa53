"""OpenRLHF's PolicyLoss between the bounds, or with the weights, of a clip rule."""

import inspect
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from openrlhf.models import PolicyLoss
from openrlhf.models.utils import masked_mean

from openrlhf_bapo.openrlhf.settings import TOKEN_WEIGHTS
from openrlhf_bapo.rules.clip_config import ClipConfig
from openrlhf_bapo.rules.clip_rules import ClipRule, Tokens, make_clip_rule, share_weights
from openrlhf_bapo.rules.rule_loss import ClipRuleLoss
from openrlhf_bapo.rules.staleness_weights import LEVELS, tapered_weights


def correction_weights(
    loss: PolicyLoss, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, action_mask: torch.Tensor
) -> torch.Tensor:
    """Return each token's weight by OpenRLHF's IS correction, as `PolicyLoss.forward` computes it.

    All tensors are [batch, actions]; the weights are at least 0. The settings are those of `loss`, whose level is not
    "off".
    """
    low, high = loss.is_correction_threshold
    log_ratio = old_log_probs - rollout_log_probs
    if loss.is_correction_mode == "clip":  # OpenRLHF allows it only for token ratios
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


class BapoPolicyLoss(ClipRuleLoss, PolicyLoss):
    """The clipped surrogate of `PolicyLoss` (openrlhf/models/loss.py) between the bounds of a clip rule.

    With a rule that gives weights, the loss is -w A log pi per token, without a clip.

    Dual clip, IS correction, aggregation and the five results are OpenRLHF's own. A token counts in the search with its
    weight in the loss, with IS correction or tapered weights in it.

    Args:
        clip_config: BAPO's settings. Its `dual_clip` has no effect here: `PolicyLoss` has an argument of this name.
        rule: a clip rule in place of BAPO's with `clip_config`.
        token_weight: "none", or "rollout_prob" to weight a token in the search by pi_behavior(token). The paper writes
            Eq. 8 (section 4.2) with that weight. Over sampled tokens it counts the probability twice, so it is not the
            default.
        is_proximal: whether the ratio is against the policy that training on the rollout starts from, so that
            pi_behavior is in `rollout_log_probs`, as with IS correction and tapered weights.
        tapered: "token" or "sequence", to weigh each token's loss by `tapered_weights` of old / rollout at this level;
            None: no such weights.
        group: data-parallel ranks whose tokens count together; None: this process alone.
        **kwargs: `PolicyLoss`'s own arguments. Its `clip_eps_low` and `clip_eps_high` are overwritten.

    Raises:
        ValueError: for a `policy_loss_type` other than "ppo" (a rule bounds each token's ratio, gspo has one ratio per
            sequence), an unknown `token_weight` or level, or tapered weights with IS correction or a rule with weights.
    """

    rule_weights: torch.Tensor | None
    """[batch, actions], of the last call: w of a rule that gives weights; None with any other rule."""

    def __init__(
        self,
        *args: Any,
        clip_config: ClipConfig | None = None,
        rule: ClipRule | None = None,
        token_weight: str = "none",
        is_proximal: bool = False,
        tapered: str | None = None,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        PolicyLoss.__init__(self, *args, **kwargs)
        if self.policy_loss_type != "ppo":
            raise ValueError(f"policy_loss_type {self.policy_loss_type!r} has no token ratio to bound; use 'ppo'")
        if token_weight not in TOKEN_WEIGHTS:
            raise ValueError(f"token_weight {token_weight!r} is not allowed; it must be one of {TOKEN_WEIGHTS}")
        self.token_weight, self.is_proximal, self.tapered = token_weight, is_proximal, tapered
        self._negative = torch.zeros(2, dtype=torch.float64)  # sum of the weights, and number, of tokens with A < 0
        ClipRuleLoss.__init__(self, rule or make_clip_rule(clip_config or ClipConfig()), group)
        if tapered is not None and tapered not in LEVELS:
            raise ValueError(f"tapered {tapered!r} is not allowed; it must be one of {LEVELS}, or None")
        if tapered and (self.is_correction_level != "off" or self.rule.has_weights):
            raise ValueError("tapered weights are not allowed with IS correction, or with a rule that gives weights")

    @classmethod
    def from_policy_loss(cls, loss: PolicyLoss, **kwargs: Any) -> "BapoPolicyLoss":
        """Return the same loss with a clip rule; upstream keeps every argument under its own name."""
        arguments = {name: getattr(loss, name) for name in inspect.signature(PolicyLoss).parameters}
        return cls(**arguments, **kwargs)

    @property
    def weighs_staleness(self) -> bool:
        """Whether the loss weighs tokens by tapered weights or IS correction, which need `rollout_log_probs`."""
        return bool(self.tapered) or self.is_correction_level != "off"

    def staleness_weights(
        self,
        old_log_probs: torch.Tensor,
        rollout_log_probs: torch.Tensor | None,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
    ) -> torch.Tensor:
        """Return each token's weight by old / rollout, in a loss that `weighs_staleness`; all are [batch, actions]."""
        assert rollout_log_probs is not None, "the weights need the log-probs of the policy that generated the tokens"
        if self.tapered:
            return tapered_weights(old_log_probs - rollout_log_probs, advantages, action_mask, self.tapered)
        return correction_weights(self, old_log_probs, rollout_log_probs, action_mask)

    def tally(
        self,
        log_probs: torch.Tensor,
        behavior_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor | None = None,
    ) -> None:
        """Add one micro-batch to the running update. All arguments are [batch, actions].

        The ratio is against `behavior_log_probs`. IS correction and tapered weights need `rollout_log_probs`.
        """
        tokens = self._tokens(log_probs, behavior_log_probs, advantages, action_mask, rollout_log_probs)
        self.tally_tokens(self._in_search(tokens, rollout_log_probs))

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
        weights = self.rule_weights = self._set_bounds(self._in_search(tokens, rollout_log_probs), tokens)
        if self.tapered:
            taper = self.staleness_weights(old_log_probs, rollout_log_probs, advantages, mask)
            negative = (mask > 0) & (advantages < 0)
            sums = torch.stack([torch.where(negative, taper, 0.0).double().sum(), negative.double().sum()])
            self._negative = self._negative.to(sums.device) + sums
            # Weights of at least 0 pass through min and clamp, so the clipped surrogate gets them with the advantages.
            advantages = advantages * taper
        if weights is None:
            return super().forward(
                log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, **loss_batch_info
            )
        # At ratio 1, the surrogate's gradient with advantages w A is that of w A log pi.
        if rollout_log_probs is not None:  # IS correction stays old / rollout
            rollout_log_probs = rollout_log_probs + (log_probs.detach() - old_log_probs)
        loss, clip_ratio, _, vllm_kl, filtered = super().forward(
            log_probs, log_probs.detach(), weights * advantages, action_mask, rollout_log_probs, **loss_batch_info
        )
        ppo_kl = masked_mean(old_log_probs - log_probs.detach(), action_mask, dim=None)
        return loss, clip_ratio, ppo_kl, vllm_kl, filtered

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of `ClipRuleLoss`, and with tapered weights "offpolicy/weight_negative"."""
        metrics = super().take_metrics()
        if self.tapered:
            total, num = self._sum_over_ranks(self._negative).tolist()
            self._negative = torch.zeros_like(self._negative)
            metrics |= {"offpolicy/weight_negative": total / num} if num else {}
        return metrics

    def _tokens(
        self,
        log_probs: torch.Tensor,
        behavior_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor | None,
    ) -> Tokens:
        """Return the tokens with their weights in the loss, IS correction or tapered weights included."""
        weight = share_weights(action_mask, self.rule.config, "update" if self.token_level_loss else "sequence")
        if self.weighs_staleness:
            weight = weight * self.staleness_weights(behavior_log_probs, rollout_log_probs, advantages, action_mask)
        return Tokens(log_probs.detach(), behavior_log_probs, advantages, weight)

    def _in_search(self, tokens: Tokens, rollout_log_probs: torch.Tensor | None) -> Tokens:
        """Return the tokens with their weights in the search."""
        if self.token_weight == "none":
            return tokens
        behavior_log_probs = tokens.behavior_log_probs
        if (self.is_proximal or self.weighs_staleness) and rollout_log_probs is not None:
            behavior_log_probs = rollout_log_probs
        return replace(tokens, weight=tokens.weight * behavior_log_probs.exp())
