"""Updates whose loss or gradient is not finite: skipped by DeepSpeed on all ranks together, before they do harm.

DeepSpeed 0.19.6 looks at the gradients in fp16, and in bf16 with ZeRO-1 and 2. ZeRO-3 and 0 in bf16, and all of fp32,
would let a NaN into weights and Adam's moments. What it skips it counts in the engine's `skipped_steps`, and the
learning-rate schedule stands still.
"""

import math

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine


def skip_updates_that_are_not_finite(engine: DeepSpeedEngine) -> None:
    """Let the engine skip an optimizer step whose gradient is not finite on any rank; one host sync a step."""
    if engine.fp16_enabled():
        return  # as ever
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

        def step_if_finite(*args, **kwargs):
            optimizer.overflow = not _is_finite_everywhere(_reduced_gradients(engine))
            if not optimizer.overflow:
                return step(*args, **kwargs)

        optimizer.step = step_if_finite


def with_its_gradient(loss: torch.Tensor) -> torch.Tensor:
    """The same loss; its gradient is NaN where the loss is not finite, so that one check sees both."""
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan)


def _reduced_gradients(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    """Of ZeRO-0, on every rank all of them; so too of ZeRO-1 in bf16 with `--ds.grad_accum_dtype fp32`."""
    if hasattr(engine.optimizer, "fp32_groups_gradients_flat"):
        return engine.optimizer.fp32_groups_gradients_flat
    return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]


def _is_finite_everywhere(gradients: list[torch.Tensor]) -> bool:
    largest = torch.stack([gradient.abs().amax().float() for gradient in gradients]).amax()  # NaN if any is
    is_bad = (~largest.isfinite()).int()
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    return not is_bad.item()
