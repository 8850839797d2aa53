"""OpenRLHF's ActorPPOTrainer with BAPO's loss and metrics, and clip bounds per optimizer step."""

import contextlib
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray import ppo_actor
from openrlhf.utils.vlm_utils import merge_mm_train_inputs

from openrlhf_bapo.offpolicy.offpolicy_metrics import OffPolicyTally, offpolicy_metrics, tally_offpolicy
from openrlhf_bapo.openrlhf.lora import merged_for_engines
from openrlhf_bapo.openrlhf.policy_loss import BapoPolicyLoss
from openrlhf_bapo.openrlhf.registration import in_place_of
from openrlhf_bapo.openrlhf.replay_checkpoint import adapter_settings, load_clip_rule, save_clip_rule
from openrlhf_bapo.openrlhf.settings import has_proximal_ratio, is_off_policy, is_tapered
from openrlhf_bapo.openrlhf.skipped_updates import skip_updates_that_are_not_finite, with_its_gradient
from openrlhf_bapo.openrlhf.token_dump import TokenDump
from openrlhf_bapo.rules.clip_rules import ClipRule, FixedBounds, importance_ratio
from openrlhf_bapo.rules.rule_loss import Timer, leave_out_nonfinite
from openrlhf_bapo.rules.settings import clip_rule_from_args
from openrlhf_bapo.rules.update_windows import UpdateWindowLoader


class BapoActorTrainer(ppo_actor.ActorPPOTrainer):
    """OpenRLHF's trainer of one data-parallel rank, with the clip rule that `--policy_loss` asks for.

    The rule closes an update per optimizer step, with the tally of all its micro-batches on all data-parallel ranks. A
    rule that needs the tally first gets it in one of three ways. With one micro-batch per step, the loss tallies the
    ratios that it computes anyway. With more, the ratios come from a forward pass without gradient over the window. The
    first step after fresh rollouts without replay needs no forward pass: OpenRLHF has just computed the log-probs with
    the same weights. gspo, which bounds each sequence's ratio, has no rule.

    With every loss, a token whose log-prob, ratio or advantage is not finite counts only in
    `offpolicy/nonfinite_tokens`, and an update whose loss or gradient is not finite is skipped.
    """

    actor_loss_fn: Any
    """OpenRLHF's PolicyLoss, or BapoPolicyLoss around the same settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.global_step = 0
        """The running training step, as OpenRLHF counts them in its logs."""
        self._group = self.strategy.ds_device_mesh["dp"].get_group()
        low, high = self.actor_loss_fn.clip_eps_low, self.actor_loss_fn.clip_eps_high
        is_ppo = self.args.policy_loss == "ppo"
        self._rule = FixedBounds(1 - low, 1 + high) if is_ppo else clip_rule_from_args(self.args)
        if self._rule is not None:
            self.actor_loss_fn = BapoPolicyLoss.from_policy_loss(
                self.actor_loss_fn,
                rule=self._rule,
                token_weight=self.args.bapo.token_weight or "none",
                tapered=self.args.offpolicy.weight_level if is_tapered(self.args) else None,
                group=self._group,
            )
            if self._rule.config.scope == "update":
                self.replay_buffer.update_ends = self._update_ends
                self.replay_buffer.before_update = self._before_update
            if (state := load_clip_rule(self.args)) is not None:
                self._rule.load_state_dict(state)
        self._has_proximal_ratio = has_proximal_ratio(self.args)
        self._uses_engines_log_probs = self._has_proximal_ratio or self.actor_loss_fn.is_correction_level != "off"
        self.actor_loss_fn.register_forward_pre_hook(self._leave_out_nonfinite, with_kwargs=True)
        backward = self.strategy.backward
        self.strategy.backward = lambda loss, *args, **kwargs: backward(with_its_gradient(loss), *args, **kwargs)
        skip_updates_that_are_not_finite(self.actor.model)
        self._num_skipped_in_a_row = 0
        if is_off_policy(self.args):
            self.actor_loss_fn.register_forward_hook(self._tally_off_policy, with_kwargs=True)

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Make OpenRLHF's pass over the replay buffer; add the metrics `bapo/*`, `entropy/*` and `offpolicy/*`.

        `bapo/*` and `entropy/*` are means over updates. `offpolicy/optimizer_steps_taken` counts this pass's steps.
        `offpolicy/nonfinite_tokens` and `offpolicy/updates_skipped` are logged with off-policy features, and if not 0.

        Raises RuntimeError on all ranks if more updates in a row are skipped than `--bapo.max_skipped_updates` allows,
        or if no token at all is finite.
        """
        self._is_first_update = True
        self._ratio_forward_timers: list[Timer] = []
        self._off_policy_tally: OffPolicyTally | None = None
        self._steps_before, skipped_before = self._num_steps(), self.actor.model.skipped_steps
        self._num_tokens = 0.0
        self._num_nonfinite: int | torch.Tensor = 0
        self.global_step += 1
        every, dump = self.args.bapo.dump_tokens, None
        if every and self.global_step % every == 0 and self.strategy.is_rank_0():
            dump = TokenDump(self)
        status = super().ppo_train(kl_ctl)
        if dump is not None:
            dump.write()
        status.update(self._fault_metrics(self.actor.model.skipped_steps - skipped_before))
        if self._rule is not None:
            status.update(self._rule_metrics(self._rule))
        if self._off_policy_tally is not None:
            status.update(offpolicy_metrics(self._off_policy_tally.all_reduce(self._group)))
            status["offpolicy/optimizer_steps_taken"] = self._steps_taken()
        status["optimizer_steps_taken"] = self._steps_taken()  # for the trainer, which does not log it
        return status

    def broadcast_to_vllm(self) -> None:
        """Send the weights to the engines. A LoRA adapter (`--ds.lora.rank`) is merged into them on the way."""
        with merged_for_engines(self) if self.args.ds.lora.rank else contextlib.nullcontext():
            super().broadcast_to_vllm()

    def _rule_metrics(self, rule: ClipRule) -> dict[str, float]:
        """Close the last update; return the metrics of all updates of this pass, and the seconds that the rule took."""
        self.actor_loss_fn.close_update()
        metrics, seconds = self.actor_loss_fn.take_metrics(), self.actor_loss_fn.take_seconds()
        if rule.searches:
            metrics["timing/bapo_search"] = seconds
            if rule.config.scope == "update":
                metrics["timing/bapo_ratio_forward"] = sum(timer.seconds() for timer in self._ratio_forward_timers)
        return metrics

    def training_step(self, experience: Experience, *args: Any, **kwargs: Any) -> dict:
        """Make OpenRLHF's training step; keep the micro-batch for the loss's hook, which reads its staleness."""
        self._experience, engine = experience, self.actor.model
        num_updates, num_skipped = engine.global_steps, engine.skipped_steps
        status = super().training_step(experience, *args, **kwargs)
        self._num_tokens += status["num_action_tokens"]
        if engine.global_steps > num_updates:
            self._note_update(engine.skipped_steps > num_skipped)
        return status

    def _note_update(self, is_skipped: bool) -> None:
        if self._rule is not None:
            self.actor_loss_fn.entropy_rule.close_update(is_skipped)
            if is_skipped and not self._rule.needs_tally_first:
                self.actor_loss_fn.close_update(is_skipped)  # now, and not before the next update
        self._num_skipped_in_a_row = self._num_skipped_in_a_row + 1 if is_skipped else 0
        most = self.args.bapo.max_skipped_updates
        # In fp16 DeepSpeed finds its loss scale by skipping updates.
        if self._num_skipped_in_a_row > most and not self.actor.model.fp16_enabled():
            raise RuntimeError(
                f"--bapo.max_skipped_updates {most}: {self._num_skipped_in_a_row} updates in a row had a loss or a "
                "gradient that is not finite, and were skipped; resume from an earlier checkpoint with "
                "--ckpt.load_enable, and a lower --actor.adam.lr if training led here"
            )

    def _leave_out_nonfinite(self, loss_fn: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        engines = kwargs["rollout_log_probs"] if self._uses_engines_log_probs else None
        values = args if engines is None else [*args, engines]
        mask, values, num_left_out = leave_out_nonfinite(kwargs["action_mask"], *values)
        self._num_nonfinite = self._num_nonfinite + num_left_out
        kwargs = kwargs | {"action_mask": mask}
        return tuple(values[:3]), kwargs if engines is None else kwargs | {"rollout_log_probs": values[3]}

    def _fault_metrics(self, num_skipped: int) -> dict[str, float]:
        counts = torch.tensor([float(self._num_nonfinite), self._num_tokens], device=torch.cuda.current_device())
        torch.distributed.all_reduce(counts, group=self._group)
        num_nonfinite, num_tokens = counts.tolist()
        if 0 < num_tokens == num_nonfinite:
            raise RuntimeError(
                "no token of a training step has a finite log-prob, ratio and advantage; resume from an earlier "
                "checkpoint with --ckpt.load_enable, and look at the rewards and at the engines' log-probs"
            )
        counted = {"nonfinite_tokens": num_nonfinite, "updates_skipped": float(num_skipped)}
        shown = is_off_policy(self.args)
        return {f"offpolicy/{name}": count for name, count in counted.items() if shown or count}

    def _tally_off_policy(self, loss_fn: Any, args: tuple, kwargs: dict, _: object) -> None:
        log_probs, denominators, advantages = (x.detach() for x in args)
        behavior_log_probs, lower, upper = denominators, 1 - loss_fn.clip_eps_low, 1 + loss_fn.clip_eps_high
        if self._has_proximal_ratio and kwargs["rollout_log_probs"] is not None:
            behavior_log_probs = kwargs["rollout_log_probs"]
            # Where the loss's ratio exceeds a bound, the ratio against the behavior policy exceeds the shifted bound.
            shift = importance_ratio(denominators, behavior_log_probs)
            lower, upper = lower * shift, upper * shift
        tally = tally_offpolicy(
            importance_ratio(log_probs, behavior_log_probs),
            advantages,
            kwargs["action_mask"],
            self._experience.staleness,
            self._experience.optimizer_steps + self._steps_taken(),
            lower,
            upper,
        )
        self._off_policy_tally = tally if self._off_policy_tally is None else self._off_policy_tally + tally

    def _num_steps(self) -> int:
        """Count the optimizer steps of the engine, not counting skipped ones."""
        return self.actor.model.global_steps - self.actor.model.skipped_steps

    def _steps_taken(self) -> int:
        return self._num_steps() - self._steps_before

    def _update_ends(self, num_micro_batches: int) -> list[bool]:
        """Say for each micro-batch of one epoch whether it is the last one of its optimizer step."""
        if self.args.train.dynamic_batch_enable:
            return [bool(end) for end in self.replay_buffer.dynamic_optimizer_step]
        # loss_utils.iter_grad_accum_global_norm cuts them like this, a shorter last window included.
        accumulated = max(self.strategy.accumulated_gradient, 1)
        return [(i + 1) % accumulated == 0 or i + 1 == num_micro_batches for i in range(num_micro_batches)]

    @torch.no_grad()
    def _before_update(self, window: list[Experience]) -> None:
        if not self.actor_loss_fn.rule.needs_tally_first:
            self.actor_loss_fn.close_update()  # the update before this one
            return
        is_first, self._is_first_update = self._is_first_update, False
        if len(window) == 1:
            self.actor_loss_fn.search_in_each_call()
            return
        for experience in window:
            experience.to_device(torch.cuda.current_device())
            behavior_log_probs, log_probs = experience.action_log_probs, experience.start_log_probs
            if not is_first or log_probs is None:
                log_probs = self._action_log_probs(experience)
            values = [log_probs, behavior_log_probs, experience.advantages]
            if self._uses_engines_log_probs:
                values.append(experience.rollout_log_probs)
            mask, values, _ = leave_out_nonfinite(experience.action_mask, *values)
            self.actor_loss_fn.tally(*values[:3], mask, *values[3:])
        self.actor_loss_fn.close_update()

    def _action_log_probs(self, experience: Experience) -> torch.Tensor:
        """Return log pi_theta of a micro-batch's action tokens, [batch, actions], as PolicyModelActor.forward does."""
        mm_inputs = {}
        if experience.mm_train_inputs and getattr(self.actor, "is_vlm", False):
            mm_inputs = merge_mm_train_inputs(experience.mm_train_inputs, experience.sequences.device)
        self.actor.eval()  # training_step switches back to training
        self._ratio_forward_timers.append(timer := Timer())
        with timer:
            return self.actor(
                experience.sequences,
                experience.action_mask,
                attention_mask=experience.attention_mask,
                ring_attn_group=self.strategy.ring_attn_group,
                **mm_inputs,
            )


def use_actor_trainer(upstream: Any) -> None:
    """Put our classes into `openrlhf.trainer.ray.ppo_actor`."""
    actor = upstream.PolicyModelActor.__ray_metadata__.modified_class  # the class behind Ray's actor class

    @in_place_of(actor, "init_model_from_pretrained")
    def init_model_from_pretrained(init: Any, self: Any, strategy: Any, *args: Any, **kwargs: Any) -> None:
        init(self, strategy, *args, **kwargs)
        # The actor's first step follows the checkpoint, and the steps that train the critic alone.
        saved = self.checkpoint_states.get("global_step", 0)
        self.trainer.global_step = max(saved, strategy.args.critic.freezing_steps + 1)

    @in_place_of(actor, "save_checkpoint")
    def save_checkpoint(save: Any, self: Any, tag: str, client_states: dict | None = None, **kwargs: Any) -> Any:
        rule, args = self.trainer._rule, self.strategy.args
        if rule is not None and rule.follows_updates and self.strategy.is_rank_0():
            save_clip_rule(args, tag, rule.state_dict())
        return save(self, tag, (client_states or {}) | {"lora": adapter_settings(args)}, **kwargs)

    upstream.ActorPPOTrainer = BapoActorTrainer
    upstream.DataLoader = UpdateWindowLoader
