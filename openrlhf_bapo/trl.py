"""BAPO in TRL: `GRPOTrainer` whose clip bounds are found for each optimizer step (written against TRL 1.16).

    from openrlhf_bapo import ClipConfig
    from openrlhf_bapo.trl import BapoGRPOTrainer

    trainer = BapoGRPOTrainer(model, reward_funcs, args=GRPOConfig(...), train_dataset=..., bapo=ClipConfig())

TRL's loss clips to [1 - epsilon_low, 1 + epsilon_high] and reads both from the trainer, so that it is enough to
set them before it runs, from the tokens of all micro-batches of the optimizer step, on all processes.
"""

import inspect
import warnings
from collections.abc import Iterable

import torch
from trl import GRPOTrainer

from openrlhf_bapo.core.bounds_metrics import bounds_metrics
from openrlhf_bapo.core.clip_bounds import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    solve_clip_bounds,
    tally_contributions,
)
from openrlhf_bapo.core.steady_bounds import SmoothingConfig, SteadyBounds

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""Those with a clipped ratio a token."""


class BapoGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` between bounds from BAPO's search; every argument of its own, and two of ours.

    Logs `bounds_metrics` (core/bounds_metrics.py), each of a whole optimizer step.

    Args:
        bapo: the search.
        smoothing: how slowly the bounds follow the optimizer steps before; they then need no forward of their own.
            None: found anew in every step, by one forward without gradient over its micro-batches (none where TRL keeps
            no log-probs of the behaviour policy: every ratio is 1 then).

    Raises:
        ValueError: for a loss that has no ratio a token to bound, or that bounds it in its own way.
    """

    def __init__(self, *args, bapo: ClipConfig, smoothing: SmoothingConfig | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        level, delta = self.importance_sampling_level, self.args.delta
        for name, value, is_allowed, allowed in (
            ("loss_type", self.loss_type, self.loss_type in LOSS_TYPES, f"one of {', '.join(LOSS_TYPES)}"),
            ("importance_sampling_level", level, level == "token", "token: BAPO bounds a token's ratio"),
            ("delta", delta, delta is None, "None: it would bound the ratio a second time"),
        ):
            if not is_allowed:
                raise ValueError(f"{name} {value!r} is not allowed with BAPO; it must be {allowed}")
        self.bapo = bapo
        self.steady = None if smoothing is None else SteadyBounds(bapo, smoothing)
        self._trained: list[ContributionTally] = []
        self._log_probs: torch.Tensor | None = None

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        if self._step % self.current_gradient_accumulation_steps == 0:
            bounds = self.steady
            if bounds is None:
                window = (tally_contributions(*self._tokens(model, each), self.bapo) for each in self._window())
                bounds = solve_clip_bounds(self._reduced(window), self.bapo)
                self._log_bounds(bounds)
            self.epsilon_low, self.epsilon_high = 1 - bounds.lower.item(), bounds.upper.item() - 1
        loss = super()._compute_loss(model, inputs)
        if self.steady is not None:
            self._trained.append(self.steady.tally(*self._tokens_at(self._log_probs, inputs)))
            if (self._step + 1) % self.current_gradient_accumulation_steps == 0:
                self._log_bounds(*self.steady.end_update(self._reduced(self._trained)))
                self._trained = []
        return loss

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._log_probs = found[0].detach()
        return found

    def _window(self) -> list[dict]:
        """The micro-batches of the optimizer step that begins."""
        per_generation = self.args.steps_per_generation
        left = per_generation * self.num_iterations - self._step % (per_generation * self.num_iterations)
        num = self.current_gradient_accumulation_steps
        if left < num:
            warnings.warn(
                f"gradient_accumulation_steps {num} reaches beyond a generation: of an optimizer step that does, the "
                "search sees the micro-batches of the first one alone",
                stacklevel=2,
            )
        return [self._buffered_inputs[(self._step + i) % per_generation] for i in range(min(num, left))]

    @torch.no_grad()
    def _tokens(self, model, inputs: dict) -> tuple[torch.Tensor, ...]:
        """Ratio, advantages and weights of a micro-batch that is yet to be trained on, each [batch, tokens]."""
        if inputs.get("old_per_token_logps") is None:
            return self._tokens_at(torch.zeros_like(inputs["completion_mask"], dtype=torch.float32), inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        names = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters  # what images need
        others = {name: inputs[name] for name in names if name in inputs}
        num_kept = inputs["completion_ids"].size(1)
        log_probs, *_ = self._get_per_token_logps_and_entropies(model, ids, mask, num_kept, **others)
        return self._tokens_at(log_probs, inputs)

    def _tokens_at(self, log_probs: torch.Tensor, inputs: dict) -> tuple[torch.Tensor, ...]:
        """The same from the policy's log-probs, [batch, tokens]; as TRL's loss, without old ones every ratio is 1."""
        old_log_probs = inputs.get("old_per_token_logps")
        ratio = (log_probs - (log_probs if old_log_probs is None else old_log_probs)).exp()
        weight = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if self.loss_type == "grpo":  # a mean over the tokens of each response
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
        elif self.loss_type == "bnpo":  # a mean over the tokens of each micro-batch
            weight = weight / weight.sum().clamp(min=1)
        advantages = inputs["advantages"]
        return ratio, (advantages if advantages.dim() == 2 else advantages[:, None]).expand_as(ratio), weight

    def _reduced(self, tallies: Iterable[ContributionTally]) -> ContributionTally:
        """Their sum over all processes."""
        return ContributionTally(self.accelerator.reduce(sum(tally.sums for tally in tallies), reduction="sum"))

    def _log_bounds(self, *used_and_found: ClipBounds) -> None:
        for name, value in bounds_metrics(*([bounds] for bounds in used_and_found)).items():
            self._metrics["train"][name].append(value)
