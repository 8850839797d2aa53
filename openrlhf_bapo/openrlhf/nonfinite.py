"""What is not finite: tokens are left out of the loss, updates are skipped on all ranks together; both are counted.

DeepSpeed 0.19.6 can check the gradients in fp16, and in bf16 with ZeRO-1 and 2. With ZeRO-3 and 0 in bf16, and always
in fp32, a NaN would reach the weights and Adam's moments. DeepSpeed counts skipped updates in the engine's
`skipped_steps`, and does not advance the learning-rate schedule for them.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from openrlhf_bapo.openrlhf.settings import is_off_policy, reads_engine_log_probs
from openrlhf_bapo.openrlhf.training_pass import PassPart
from openrlhf_bapo.rules.rule_loss import leave_out_nonfinite


class NonfiniteTokens(PassPart):
    """Leaves out tokens whose log-prob, ratio or advantage is not finite; counts them."""

    def begin(self) -> None:
        """Count from 0."""
        self._counts: int | torch.Tensor = 0  # of the tokens that were left out, and of all

    def before_loss(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Mask the tokens, and put zeros in the place of their values."""
        engines = kwargs["rollout_log_probs"] if reads_engine_log_probs(self.trainer.args) else None
        values = args if engines is None else [*args, engines]
        mask, values, num_left_out = leave_out_nonfinite(kwargs["action_mask"], *values)
        self._counts = self._counts + torch.stack([num_left_out, (kwargs["action_mask"] > 0).sum()])
        kwargs = kwargs | {"action_mask": mask}
        return tuple(values[:3]), kwargs if engines is None else kwargs | {"rollout_log_probs": values[3]}

    def end(self) -> dict[str, float]:
        """Return the number over all ranks, as `shown_if_any`.

        Raises:
            RuntimeError: on all ranks, if no token at all is finite.
        """
        counts = torch.zeros(2, device=torch.cuda.current_device(), dtype=torch.float64) + self._counts
        dist.all_reduce(counts, group=self.trainer.group)
        num_nonfinite, num_tokens = counts.tolist()
        if 0 < num_tokens == num_nonfinite:
            raise RuntimeError(
                "no token of a training step has a finite log-prob, ratio and advantage; resume from an earlier "
                "checkpoint with --ckpt.load_enable, and look at the rewards and at the engines' log-probs"
            )
        return shown_if_any(self.trainer, "offpolicy/nonfinite_tokens", num_nonfinite)


class SkippedUpdates(PassPart):
    """Lets DeepSpeed skip updates that are not finite; ends the run after too many in a row."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        backward = trainer.strategy.backward
        trainer.strategy.backward = lambda loss, *args, **kwargs: backward(with_its_gradient(loss), *args, **kwargs)
        skip_updates_that_are_not_finite(trainer.actor.model)
        self._num_in_a_row = 0

    def begin(self) -> None:
        """Note how many updates were skipped before the pass."""
        self._skipped_before = self.trainer.actor.model.skipped_steps

    def after_update(self, is_skipped: bool) -> None:
        """Count skipped updates in a row.

        Raises:
            RuntimeError: on all ranks, if there are more than `--bapo.max_skipped_updates` allows.
        """
        self._num_in_a_row = self._num_in_a_row + 1 if is_skipped else 0
        most = self.trainer.args.bapo.max_skipped_updates
        # In fp16 DeepSpeed finds its loss scale by skipping updates.
        if self._num_in_a_row > most and not self.trainer.actor.model.fp16_enabled():
            raise RuntimeError(
                f"--bapo.max_skipped_updates {most}: {self._num_in_a_row} updates in a row had a loss or a "
                "gradient that is not finite, and were skipped; resume from an earlier checkpoint with "
                "--ckpt.load_enable, and a lower --actor.adam.lr if training led here"
            )

    def end(self) -> dict[str, float]:
        """Return the number of the pass, as `shown_if_any`."""
        num_skipped = self.trainer.actor.model.skipped_steps - self._skipped_before
        return shown_if_any(self.trainer, "offpolicy/updates_skipped", float(num_skipped))


def shown_if_any(trainer: Any, name: str, count: float) -> dict[str, float]:
    """Return the metric with off-policy features, and otherwise only if it is not 0."""
    return {name: count} if count or is_off_policy(trainer.args) else {}


def skip_updates_that_are_not_finite(engine: DeepSpeedEngine) -> None:
    """Make the engine skip optimizer steps whose gradient is not finite on some rank. One host sync per step."""
    if engine.fp16_enabled():
        return  # DeepSpeed checks by itself
    optimizer = engine.optimizer
    if hasattr(optimizer, "check_grad_overflow"):  # ZeRO-1, 2
        optimizer.check_grad_overflow = True
    elif hasattr(optimizer, "_overflow_check_and_loss_scale_update"):  # ZeRO-3
        update_scale = optimizer._overflow_check_and_loss_scale_update

        def check_first() -> bool:
            optimizer.check_overflow()
            return update_scale()

        optimizer._overflow_check_and_loss_scale_update = check_first
    else:  # see `_reduced_gradients`
        step = optimizer.step

        def step_if_finite(*args: Any, **kwargs: Any) -> Any:
            optimizer.overflow = not _is_finite_everywhere(_reduced_gradients(engine))
            if not optimizer.overflow:
                return step(*args, **kwargs)
            return None

        optimizer.step = step_if_finite


def with_its_gradient(loss: torch.Tensor) -> torch.Tensor:
    """Return the same loss, with a NaN gradient if the loss is not finite. The check of gradients then covers both."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def _reduced_gradients(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """Return the reduced gradients of ZeRO-0, or of ZeRO-1 in bf16 with `--ds.grad_accum_dtype fp32`, on every rank."""
    if hasattr(engine.optimizer, "fp32_groups_gradients_flat"):
        return engine.optimizer.fp32_groups_gradients_flat
    return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]


def _is_finite_everywhere(gradients: list[torch.Tensor]) -> bool:
    largest = torch.stack([gradient.abs().amax().float() for gradient in gradients]).amax()  # NaN if any is
    is_bad = (~largest.isfinite()).int()
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    return not is_bad.item()
