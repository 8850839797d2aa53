"""BAPO in TRL: `GRPOTrainer` with a clip rule for each optimizer step (written against TRL 1.16).

    from openrlhf_bapo.trl import BapoGRPOTrainer

    trainer = BapoGRPOTrainer(model, reward_funcs, args=GRPOConfig(...), train_dataset=..., bapo="paper")

TRL's loss clips to [1 - epsilon_low, 1 + epsilon_high]. It reads both epsilons from the trainer after its forward pass,
so the trainer sets them at the end of that pass. The loss then reads advantages and old log-probs from its inputs. For
a rule that gives weights, the trainer puts w A and a ratio of 1 into a copy of the inputs.
"""

import copy
import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer
from trl.trainer.base_trainer import _BaseTrainer
from trl.trainer.callbacks import TrainerCallback

from openrlhf_bapo.rules.clip_config import ClipConfig
from openrlhf_bapo.rules.clip_rules import ClipRule, Tokens, share_weights
from openrlhf_bapo.rules.other_rules import as_clip_rule
from openrlhf_bapo.rules.rule_loss import RuleUpdates
from openrlhf_bapo.rules.saved_rule import load_rule, save_rule

SAVED_RULE = "clip_rule"
"""The folder of the rule's state in a checkpoint."""

MEAN_OVER = {"grpo": "sequence", "bnpo": "micro_batch", "dr_grpo": "update", "dapo": "update"}
"""TRL's losses with a clipped ratio per token, and the tokens of their first mean (`share_weights`)."""


class _StepEnd(TrainerCallback):
    """Closes each optimizer step of a trainer with a clip rule."""

    def __init__(self, trainer: "ClipRuleTrainer") -> None:
        self._trainer = trainer

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Hear that an optimizer step ended, which fp16 skips where a gradient is not finite."""
        self._trainer._close_step(self._trainer.accelerator.optimizer_step_was_skipped)


class ClipRuleTrainer(_BaseTrainer):
    """The clip rule of one of TRL's trainers: its updates, their metrics, and its state in checkpoints.

    A subclass calls `_tally_first` before each loss, and counts it afterwards. It has two methods for a search:
    `_window` returns the micro-batches of the optimizer step that begins, and `_tokens_before_training` the tokens of
    one of them.
    """

    args: Any
    epsilon_low: float | torch.Tensor
    epsilon_high: float | torch.Tensor

    def _use_rule(self, bapo: ClipConfig | ClipRule | str) -> ClipConfig:
        for name, default in (("epsilon", 0.2), ("epsilon_high", None)):
            value = getattr(self.args, name)
            require(value == default, name, value, f"{default}: the bounds are those of `bapo`")
        self.clip_rule = as_clip_rule(bapo)
        group = torch.distributed.group.WORLD if self.accelerator.num_processes > 1 else None
        self._updates = RuleUpdates(self.clip_rule, group)
        self._micro_batches: list[Any] = []  # of the running optimizer step, from the data loader
        self._num_trained = 0  # micro-batches of it
        self.add_callback(_StepEnd(self))
        return self.clip_rule.config

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple:
        """Return the micro-batches of the optimizer step that begins; the last step of an epoch may have fewer."""
        found = super().get_batch_samples(*args, **kwargs)
        self._micro_batches, self._num_trained = found[0], 0
        return found

    def _tally_first(self, model: torch.nn.Module, inputs: dict) -> None:
        """Before a loss, choose the bounds of a rule that needs the tally first; `inputs` is the loss's micro-batch."""
        rule = self.clip_rule
        is_micro_batch = rule.config.scope == "micro_batch"
        if rule.needs_tally_first and (is_micro_batch or self._num_trained == 0):
            for micro_batch in [inputs] if is_micro_batch else self._window():
                rule.tally(self._tokens_before_training(model, micro_batch))
            self._close_update()

    def _tally_training(
        self, tokens: Tokens, staleness: torch.Tensor | None, optimizer_steps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tally a micro-batch that the loss is about to train on; returns its lower and upper bounds, and its weights.

        All are [samples, tokens]; `staleness` and `optimizer_steps` are those of `tally_offpolicy`.
        """
        rule = self.clip_rule
        if not rule.needs_tally_first:
            rule.tally(tokens)
        self._updates.entropy_rule.tally(rule, tokens, rule.config.dual_clip)
        self._updates.tally_offpolicy(tokens, staleness, optimizer_steps)
        return *rule.bounds(tokens), rule.weights(tokens)

    def _close_step(self, is_skipped: bool) -> None:
        """Close an optimizer step, and log its metrics."""
        if not self.clip_rule.needs_tally_first:
            self._close_update(is_skipped)
        self._updates.entropy_rule.close_update(is_skipped)
        self._log(self._updates.take_metrics())

    def _close_update(self, is_skipped: bool = False) -> None:
        self._updates.close_update(is_skipped)
        self._log(self._updates.take_bounds_metrics())

    def _log(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the mean of each metric over the steps since the last log, as TRL does, and the largest of our maxima."""
        for name, values in self._metrics["train"].items():
            if name.startswith("offpolicy/") and "_max" in name:
                values[:] = [max(values)]
        super().log(logs, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            save_rule(self.clip_rule, Path(output_dir, SAVED_RULE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_rule(self.clip_rule, Path(checkpoint, SAVED_RULE))


def require(is_allowed: bool, name: str, value: object, allowed: str) -> None:
    """Raise ValueError if the value of the setting `name` is not allowed; `allowed` says in words which values are."""
    if not is_allowed:
        raise ValueError(f"{name} {value!r} is not allowed with BAPO; it must be {allowed}")


class BapoGRPOTrainer(ClipRuleTrainer, GRPOTrainer):
    """`trl.GRPOTrainer` between the bounds, or with the weights, of a clip rule; with one more argument.

    For each optimizer step it logs `bounds_metrics` (rules/bounds_metrics.py), the metrics of `EntropyRule`, and
    `offpolicy_metrics` without staleness: TRL generates with the policy that training on the generation starts from.
    Checkpoints have the state of a rule that follows earlier steps.

    Args:
        bapo: a preset's name, BAPO's settings, a clip rule, or its name in `RULES` (rules/other_rules.py). A rule that
            needs the tally first takes one forward pass without gradient over the micro-batches of each optimizer step.
            It takes none if TRL keeps no log-probs of the behavior policy, because every ratio is then 1. With
            smoothing or a half-life, the rule follows earlier optimizer steps and needs no forward pass.

    Raises:
        ValueError: if the loss has no ratio per token, bounds it itself, or cannot apply the rule's dual clip or
            weights; and for another epsilon than TRL's default, which would have no effect.
    """

    def __init__(self, *args: Any, bapo: ClipConfig | ClipRule | str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require(self.loss_type in MEAN_OVER, "loss_type", self.loss_type, f"one of {', '.join(MEAN_OVER)}")
        config, has_weights = self._use_rule(bapo), self.clip_rule.has_weights
        corrects_kl = self.beta != 0 and self.args.use_bias_correction_kl
        level, delta = self.importance_sampling_level, self.args.delta
        dual_clip = config.dual_clip
        require(level == "token", "importance_sampling_level", level, "token: BAPO bounds each token's ratio")
        require(delta is None, "delta", delta, "None: it would bound the ratio a second time")
        quantile, allowed = self.top_entropy_quantile, "1.0: shares and bounds are those of all tokens"
        require(quantile == 1, "top_entropy_quantile", quantile, allowed)
        allowed = "None, or at least ratio_upper_max: TRL's delta bounds the ratio of positive tokens too"
        require(dual_clip is None or dual_clip >= config.ratio_upper_max, "dual_clip", dual_clip, allowed)
        allowed = "False with a rule that gives weights: TRL's loss sees ratios of 1"
        require(not (has_weights and corrects_kl), "use_bias_correction_kl", corrects_kl, allowed)
        num, per_generation = self.args.gradient_accumulation_steps, self.args.steps_per_generation
        if not has_weights and num % (per_generation * self.num_iterations) == 0:
            warnings.warn(
                f"gradient_accumulation_steps {num}, steps_per_generation {per_generation} and num_iterations "
                f"{self.num_iterations} use each generation in one optimizer step, so every ratio is 1 and bounds clip "
                f"nothing; set num_iterations={2 * num // per_generation} or steps_per_generation={2 * num}",
                stacklevel=2,
            )
        self.args = copy.copy(self.args)  # the caller's may go to another trainer
        self.args.delta = dual_clip
        self._loss_inputs: dict | None = None
        self._num_steps_since_generation = 0  # optimizer steps

    def _compute_loss(self, model: torch.nn.Module, inputs: dict) -> torch.Tensor:
        if not self.model.training:  # training leaves the bounds of its last micro-batch's tokens
            rule = self.clip_rule
            self.epsilon_low, self.epsilon_high = 1 - rule.lower.item(), rule.upper.item() - 1
            return super()._compute_loss(model, inputs)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            self._num_steps_since_generation = 0
        self._tally_first(model, inputs)
        self._loss_inputs = inputs = dict(inputs)
        loss = super()._compute_loss(model, inputs)
        self._loss_inputs = None
        self._num_trained += 1
        return loss

    def _close_step(self, is_skipped: bool) -> None:
        super()._close_step(is_skipped)
        self._num_steps_since_generation += not is_skipped

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_inputs is not None:  # the forward pass of TRL's loss, which clips next
            tokens = self._tokens(found[0].detach(), self._loss_inputs)
            steps = torch.full_like(tokens.ratio, self._num_steps_since_generation, dtype=torch.long)
            lower, upper, weights = self._tally_training(tokens, None, steps)
            if weights is None:
                self.epsilon_low, self.epsilon_high = 1 - lower, upper - 1
            else:
                self._weigh(self._loss_inputs, tokens, weights)
        return found

    def _weigh(self, inputs: dict, tokens: Tokens, weights: torch.Tensor) -> None:
        """Give TRL's loss w A and a ratio of 1. The gradient of its surrogate is then that of w A log pi."""
        # If the engine gives no log-probs, TRL's off-policy mask uses the old ones, which are replaced below.
        inputs.setdefault("sampling_per_token_logps", tokens.behavior_log_probs)
        inputs |= {"advantages": weights * tokens.advantages, "old_per_token_logps": tokens.log_probs}
        self.epsilon_low, self.epsilon_high = 1.0, math.inf

    def _window(self) -> list[dict]:
        """Return the micro-batches of the optimizer step that begins."""
        per_generation = self.args.steps_per_generation
        left = per_generation * self.num_iterations - self._step % (per_generation * self.num_iterations)
        num = len(self._micro_batches)
        if left < num:
            warnings.warn(
                f"gradient_accumulation_steps {num} reaches beyond a generation: in such an optimizer step, the search "
                "uses the micro-batches of the first generation alone",
                stacklevel=2,
            )
        return [self._buffered_inputs[(self._step + i) % per_generation] for i in range(min(num, left))]

    @torch.no_grad()
    def _tokens_before_training(self, model: torch.nn.Module, inputs: dict) -> Tokens:
        if inputs.get("old_per_token_logps") is None:
            return self._tokens(torch.zeros_like(inputs["completion_mask"], dtype=torch.float32), inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        names = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters  # the inputs for images
        others = {name: inputs[name] for name in names if name in inputs}
        num_kept = inputs["completion_ids"].size(1)
        log_probs, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, num_kept, **others)
        return self._tokens(log_probs, inputs)

    def _tokens(self, log_probs: torch.Tensor, inputs: dict) -> Tokens:
        """Return a micro-batch's tokens at the policy's log-probs, [batch, tokens]."""
        behavior_log_probs = inputs.get("old_per_token_logps")
        if behavior_log_probs is None:  # TRL's loss too takes every ratio as 1
            behavior_log_probs = log_probs
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        weight = share_weights(mask, self.clip_rule.config, MEAN_OVER[self.loss_type])
        advantages = inputs["advantages"]
        advantages = (advantages if advantages.dim() == 2 else advantages[:, None]).expand_as(log_probs)
        return Tokens(log_probs, behavior_log_probs, advantages, weight)
