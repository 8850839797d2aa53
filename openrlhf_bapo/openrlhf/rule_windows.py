"""A clip rule in a training pass: its loss, and an update per optimizer step."""

from operator import attrgetter
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.vlm_utils import merge_mm_train_inputs

from openrlhf_bapo.openrlhf.policy_loss import BapoPolicyLoss
from openrlhf_bapo.openrlhf.replay_checkpoint import load_clip_rule
from openrlhf_bapo.openrlhf.settings import has_proximal_ratio, is_tapered, reads_engine_log_probs
from openrlhf_bapo.openrlhf.training_pass import PassPart
from openrlhf_bapo.rules.clip_rules import ClipRule
from openrlhf_bapo.rules.rule_loss import leave_out_nonfinite
from openrlhf_bapo.rules.update_windows import UpdateWindows


class RuleWindows(UpdateWindows, PassPart):
    """Puts the rule's loss in the place of the trainer's; the rule goes on from the checkpoint that the run resumes."""

    def __init__(self, trainer: Any, rule: ClipRule) -> None:
        PassPart.__init__(self, trainer)
        args = trainer.args
        trainer.actor_loss_fn = BapoPolicyLoss.from_policy_loss(
            trainer.actor_loss_fn,
            rule=rule,
            token_weight=args.bapo.token_weight or "none",
            is_proximal=has_proximal_ratio(args),
            tapered=args.offpolicy.weight_level if is_tapered(args) else None,
            group=trainer.group,
        )
        known = attrgetter("start_log_probs")  # None where OpenRLHF has not just computed them
        UpdateWindows.__init__(self, trainer.actor_loss_fn, known, self._forward, self._tally)
        if rule.config.scope == "update":
            trainer.replay_buffer.update_ends = self._update_ends
            trainer.replay_buffer.before_update = self.before_update
        if (state := load_clip_rule(args)) is not None:
            rule.load_state_dict(state)

    def _update_ends(self, num_micro_batches: int) -> list[bool]:
        """Say for each micro-batch of one epoch whether it is the last one of its optimizer step."""
        trainer = self.trainer
        if trainer.args.train.dynamic_batch_enable:
            return [bool(end) for end in trainer.replay_buffer.dynamic_optimizer_step]
        # loss_utils.iter_grad_accum_global_norm cuts them like this, a shorter last window included.
        accumulated = max(trainer.strategy.accumulated_gradient, 1)
        return [(i + 1) % accumulated == 0 or i + 1 == num_micro_batches for i in range(num_micro_batches)]

    def _forward(self, experience: Experience) -> torch.Tensor:
        """Return log pi_theta of a micro-batch's action tokens, [batch, actions], as PolicyModelActor.forward does."""
        trainer, mm_inputs = self.trainer, {}
        if experience.mm_train_inputs and getattr(trainer.actor, "is_vlm", False):
            mm_inputs = merge_mm_train_inputs(experience.mm_train_inputs, experience.sequences.device)
        trainer.actor.eval()  # training_step switches back to training
        return trainer.actor(
            experience.sequences,
            experience.action_mask,
            attention_mask=experience.attention_mask,
            ring_attn_group=trainer.strategy.ring_attn_group,
            **mm_inputs,
        )

    def _tally(self, experience: Experience, log_probs: torch.Tensor) -> None:
        values = [log_probs, experience.action_log_probs, experience.advantages]
        if reads_engine_log_probs(self.trainer.args):
            values.append(experience.rollout_log_probs)
        mask, values, _ = leave_out_nonfinite(experience.action_mask, *values)
        self.trainer.actor_loss_fn.tally(*values[:3], mask, *values[3:])
