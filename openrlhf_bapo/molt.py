"""BAPO in Molt: its policy loss with a clip rule for each optimizer step (written for molt-rl 0.2.1).

    python -m openrlhf_bapo.molt --policy_loss bapo --bapo.preset paper ...

The other flags are those of `python -m molt.cli.train_rl_ray`. Molt takes the ratio against log-probs that it computes
when training on a rollout begins, which hides the rollout's staleness. Molt corrects for that with a weight per token:
its probability when training begins, divided by its probability under the engine. Here the ratio is against the
engine's log-probs, so it contains staleness and the engine's rounding. Molt's own correction is then exactly 1. The
bounds come from a rule.

Molt asks its engines for log-probs only if its correction is on, so the command turns it on.
"""

import argparse
import inspect
import math
import os
import runpy
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from molt.models import PolicyLoss
from molt.models.utils import masked_mean
from molt.trainer.algorithm.experience import Experience
from molt.trainer.fsdp.checkpoint import CheckpointManager
from molt.trainer.workers import policy_actor
from molt.utils.config import hierarchize
from molt.utils.vlm_utils import merge_mm_train_inputs

from openrlhf_bapo.flags.loss_flags import add_loss_flags, resolve_loss_flags
from openrlhf_bapo.flags.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.offpolicy.saved_pool import SavedStateError
from openrlhf_bapo.rules.clip_rules import ClipRule, FixedBounds, Tokens, share_weights
from openrlhf_bapo.rules.rule_loss import ClipRuleLoss, leave_out_nonfinite
from openrlhf_bapo.rules.saved_rule import load_rule, save_rule
from openrlhf_bapo.rules.settings import clip_rule_from_args
from openrlhf_bapo.rules.update_windows import UpdateWindowLoader, UpdateWindows

MEAN_OVER = {"token-mean": "update", "seq-mean-token-mean": "sequence"}
"""Molt's aggregations that a rule supports, and the tokens of their first mean (`share_weights`)."""


class BapoPolicyLoss(ClipRuleLoss, PolicyLoss):
    """The clipped surrogate of Molt's `PolicyLoss` between the bounds, or with the weights, of a clip rule.

    The ratio is against the engine's log-probs. Dual clip, aggregation and the six results are Molt's own.

    Args:
        loss: Molt's loss, whose settings are copied.
        rule: the clip rule.
        group: data-parallel ranks whose tokens count together; None: this process alone.
    """

    def __init__(self, loss: PolicyLoss, rule: ClipRule, group: dist.ProcessGroup | None = None) -> None:
        PolicyLoss.__init__(self, **{name: getattr(loss, name) for name in inspect.signature(PolicyLoss).parameters})
        ClipRuleLoss.__init__(self, rule, group)

    def tally(self, *batch: torch.Tensor) -> None:
        """Add the log-probs, the engine's log-probs, the advantages and the mask of a micro-batch, [batch, tokens]."""
        self.tally_tokens(self._tokens(*batch))

    def forward(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
        rollout_log_probs: torch.Tensor,
        **batch_info: Any,
    ) -> tuple:
        """Return (loss, reported loss, clip ratio, policy kl, vllm kl, filter ratio), as `PolicyLoss.forward`."""
        tokens = self._tokens(log_probs, rollout_log_probs, advantages, action_mask)
        weights = self._set_bounds(tokens, tokens)
        self.tally_offpolicy(tokens)  # Molt does not keep the versions of its policy, so the tokens' age is unknown
        denominators = rollout_log_probs
        if weights is not None:  # at ratio 1, the surrogate's gradient with advantages w A is that of w A log pi
            denominators, advantages = log_probs.detach(), weights * tokens.advantages
        loss, reported, clip_ratio, *_, filtered = super().forward(
            log_probs, denominators, advantages, action_mask, denominators, **batch_info
        )
        policy_kl, vllm_kl = (
            masked_mean((rollout_log_probs - other).nan_to_num(0.0, 0.0, 0.0), action_mask, dim=None)
            for other in (log_probs.detach(), old_log_probs)
        )
        return loss, reported, clip_ratio, policy_kl, vllm_kl, filtered

    def _tokens(
        self,
        log_probs: torch.Tensor,
        rollout_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        action_mask: torch.Tensor,
    ) -> Tokens:
        values = log_probs.detach(), rollout_log_probs, advantages
        mask, (log_probs, rollout_log_probs, advantages), _ = leave_out_nonfinite(action_mask.long(), *values)
        weight = share_weights(mask, self.rule.config, MEAN_OVER[self.loss_agg_mode])
        return Tokens(log_probs, rollout_log_probs, advantages, weight)


class BapoPolicyTrainer(policy_actor.PolicyTrainer):
    """Molt's trainer of one rank, with the clip rule that `--policy_loss` asks for.

    The rule closes an update per optimizer step (`UpdateWindows`), and knows the log-probs of the first step on a
    rollout: Molt has just computed them.
    """

    actor_loss_fn: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        loss = self.actor_loss_fn
        rule = clip_rule_from_args(self.args) or FixedBounds(1 - loss.clip_eps_low, 1 + loss.clip_eps_high)
        self.actor_loss_fn = BapoPolicyLoss(loss, rule, self.strategy._get_dp_group())
        known = attrgetter("action_log_probs")
        self._windows = UpdateWindows(self.actor_loss_fn, known, self._forward, self._tally)
        if rule.config.scope == "update":
            self.replay_buffer.update_ends = self._update_ends
            self.replay_buffer.before_update = self._windows.before_update

    def policy_train(self, kl_ctl: float) -> dict[str, float]:
        """Make Molt's pass over the replay buffer; adds `bapo/*`, `entropy/*`, `offpolicy/*` and the rule's seconds."""
        self._windows.begin()
        status = super().policy_train(kl_ctl)
        # Without policy_loss there were too few samples for an optimizer step.
        return status | self._windows.end() if "policy_loss" in status else status

    def training_step(
        self,
        experience: Experience,
        kl_ctl: float,
        batch_num_tokens: torch.Tensor,
        num_microbatches: int,
        is_optimizer_step: bool,
        *args: Any,
    ) -> dict:
        """Make Molt's training step of a micro-batch; the last one of an optimizer step closes the update."""
        status = super().training_step(experience, kl_ctl, batch_num_tokens, num_microbatches, is_optimizer_step, *args)
        if is_optimizer_step:
            self._windows.after_update(is_skipped=False)
        return status

    def _update_ends(self, num_micro_batches: int) -> list[bool]:
        """Say for each micro-batch whether it is the last of its optimizer step, as `policy_train` makes the steps."""
        if self.args.train.dynamic_batch_enable:
            return [bool(end) for end in self.replay_buffer.dynamic_optimizer_step]
        size = num_micro_batches if self.args.train.force_on_policy else self.strategy.accumulated_gradient
        return [(i + 1) % size == 0 for i in range(num_micro_batches)]

    def _forward(self, experience: Experience) -> torch.Tensor:
        """Return log pi_theta of a micro-batch's tokens, [batch, tokens], as PolicyModelActor.forward does."""
        mm_inputs = {}
        if experience.mm_train_inputs and getattr(self.actor, "is_vlm", False):
            mm_inputs = merge_mm_train_inputs(experience.mm_train_inputs, experience.sequences.device)
        self.actor.eval()  # training_step switches back to training
        found = self.actor(
            experience.sequences,
            experience.action_mask,
            experience.attention_mask,
            routed_experts=experience.routed_experts,
            **mm_inputs,
        )
        return found["action_log_probs"]

    def _tally(self, experience: Experience, log_probs: torch.Tensor) -> None:
        values = log_probs, experience.rollout_log_probs, experience.advantages, experience.action_mask
        self.actor_loss_fn.tally(*values)
        if self.args.train.force_on_policy and self.replay_buffer.cpu_offload:  # the window is the whole rollout
            experience.to_device(torch.device("cpu"))


class BapoPolicyModelActor(policy_actor.PolicyModelActor.__ray_metadata__.modified_class):
    """Molt's actor of one rank with `BapoPolicyTrainer`; its checkpoints have the state of the rule."""

    def init_model_from_pretrained(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        """Build model and trainer; the rule goes on from the checkpoint that Molt loads."""
        policy_actor.PolicyTrainer, policy_actor.DataLoader = BapoPolicyTrainer, UpdateWindowLoader
        super().init_model_from_pretrained(strategy, *args, **kwargs)
        _load_saved_rule(self.trainer.actor_loss_fn.rule, strategy.args, strategy.checkpoint)

    def append(self, experience: Experience) -> None:
        """Take an experience. A group of equal rewards gets advantages of exactly 0.

        Molt's GRPO divides the rounding of their mean by the deviation, which is rounding too: 0.92 for eight of 0.7.
        """
        std = experience.info.get("group_reward_std") if experience.info else None
        if std is not None and self.strategy.args.algo.advantage.estimator == "grpo":
            is_equal = std <= 4e-6 * experience.rewards.abs().clamp(min=1)
            experience.advantages = torch.where(is_equal[:, None], 0.0, experience.advantages)
        super().append(experience)

    def save_checkpoint(self, tag: str, *args: Any, **kwargs: Any) -> None:
        """Write the rule's state, and Molt's checkpoint around it."""
        if self.strategy.is_rank_0():
            save_rule(self.trainer.actor_loss_fn.rule, _saved_rule(self.strategy.args.ckpt.path, "_actor", tag))
        super().save_checkpoint(tag, *args, **kwargs)


def _saved_rule(*checkpoint: str) -> Path:
    return Path(*checkpoint, "clip_rule")


def _load_saved_rule(rule: ClipRule, args: Any, checkpoints: CheckpointManager) -> None:
    """Let the rule go on from the checkpoint that `--ckpt.load_enable` resumes, if it follows earlier steps.

    With LOAD_MODEL_ONLY=1, Molt loads nothing but the weights, and neither is the rule's state.

    Raises:
        SavedStateError: if the state there is damaged, or of a rule with other settings.
    """
    if args.ckpt.load_enable and rule.follows_updates and os.environ.get("LOAD_MODEL_ONLY", "0") != "1":
        if loaded := checkpoints._resolve_ckpt_load_dir(os.path.join(args.ckpt.path, "_actor")):
            load_rule(rule, _saved_rule(loaded))


def resolve_flags(values: dict) -> None:
    """Check Molt's flags against ours; set, in place, the flags that a ratio against the engine's log-probs needs.

    Args:
        values: flags by name, with dots. Without `--policy_loss` nothing is changed.

    Raises:
        FlagError: at the first mistake.
    """
    policy_loss = values["policy_loss"]
    if policy_loss is None:
        resolve_loss_flags(values, "molt")
        return
    policy_loss = values["policy_loss"] = resolve_loss_flags(values, policy_loss)
    for name, allowed in {
        "actor.loss_mode": ("ppo",),
        "actor.loss_agg_mode": tuple(MEAN_OVER),
        "algo.advantage.is_correction_level": ("off",),
        "algo.advantage.score_centering_top_k": (0,),
        "rollout.top_p": (1.0,),
    }.items():
        if values[name] not in allowed:
            raise FlagError(
                f"--{name} {values[name]}: allowed with --policy_loss {policy_loss}: {', '.join(map(str, allowed))}"
            )
    if not 0.01 <= (temperature := values["rollout.temperature"]) <= 2:  # vLLM takes 0.01 for less, the actor does not
        raise FlagError(
            f"--rollout.temperature {temperature}: allowed with --policy_loss {policy_loss}: from 0.01 to 2"
        )
    dual_clip = values["actor.dual_clip"]
    if dual_clip is not None and not 1 < dual_clip < math.inf:
        raise FlagError(f"--actor.dual_clip {dual_clip}: allowed: above 1")
    correction = {"level": "token", "mode": "mask", "gating": "ratio", "threshold": [0.0, math.inf]}
    values |= {f"algo.advantage.is_correction_{name}": value for name, value in correction.items()}


def _check_saved_rule(args: argparse.Namespace) -> None:
    """Load the rule's state as each actor will, so that a state that cannot be used ends the command before Ray."""
    nested = hierarchize(args)
    if (rule := clip_rule_from_args(nested)) is not None:
        # The manager uses Molt's strategy only to print, as long as it looks for the checkpoint.
        _load_saved_rule(rule, nested, CheckpointManager(argparse.Namespace(print=print)))


def main() -> None:
    """Run `molt.cli.train_rl_ray`, whose parser then has our flags too."""
    upstream = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
        argparse.ArgumentParser.parse_args = upstream
        add_loss_flags(parser, sys.argv[1:], ("ppo",), "Molt's own loss and ratio")
        parser.error = exit_with_one_line
        args = upstream(parser)
        try:
            resolve_flags(vars(args))
            _check_saved_rule(args)
        except (FlagError, SavedStateError) as error:
            exit_with_one_line(str(error))
        if args.policy_loss is not None:
            policy_actor.PolicyModelActor = ray.remote(num_gpus=1)(BapoPolicyModelActor)
        return args

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[assignment]
    runpy.run_module("molt.cli.train_rl_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from openrlhf_bapo import molt  # Ray's workers find its classes by name, but not those of __main__

    molt.main()
