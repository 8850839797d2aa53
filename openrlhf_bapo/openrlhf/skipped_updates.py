"""Makes DeepSpeed skip updates whose loss or gradient is not finite, on all ranks together.

DeepSpeed 0.19.6 can check the gradients in fp16, and in bf16 with ZeRO-1 and 2. With ZeRO-3 and 0 in bf16, and always
in fp32, a NaN would reach the weights and Adam's moments. DeepSpeed counts skipped updates in the engine's
`skipped_steps`, and does not advance the learning-rate schedule for them.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine


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
