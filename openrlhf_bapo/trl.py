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

from openrlhf_bapo.core.clip_bounds import (
    ClipBounds,
    ClipConfig,
    ContributionTally,
    measure_clip_bounds,
    solve_clip_bounds,
    tally_at_bounds,
    tally_contributions,
)
from openrlhf_bapo.core.steady_bounds import SmoothingConfig, SteadyBounds

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""Those with a clipped ratio a token."""


class BapoGRPOTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` between bounds from BAPO's search; every argument of its own, and two of ours.

    Logged, each of a whole optimizer step, by the names that they have in OpenRLHF: bapo/clip_low and bapo/clip_high,
    the bounds that it was trained with (importance ratios), and at them bapo/positive_share, bapo/clip_frac_positive
    and bapo/clip_frac_negative; bapo/initial_share, bapo/positive_token_frac; bapo/found_low and bapo/found_high.

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
        refused = {
            "loss_type": (self.loss_type, self.loss_type in LOSS_TYPES, f"one of {', '.join(LOSS_TYPES)}"),
            "importance_sampling_level": (
                self.importance_sampling_level,
                self.importance_sampling_level == "token",
                "token: BAPO bounds a token's ratio",
            ),
            "delta": (self.args.delta, self.args.delta is None, "None: it would bound the ratio a second time"),
            "use_liger_kernel": (
                self.args.use_liger_kernel,
                not self.args.use_liger_kernel,
                "False: its clip is fixed",
            ),
        }
        for name, (value, is_allowed, allowed) in refused.items():
            if not is_allowed:
                raise ValueError(f"{name} {value!r} is not allowed with BAPO; it must be {allowed}")
        self.bapo = bapo
        self.steady = None if smoothing is None else SteadyBounds(bapo, smoothing)
        self._trained: list[tuple[torch.Tensor, ...]] = []
        self._log_probs: torch.Tensor | None = None

    def _compute_loss(self, model, inputs):
        if not self.model.training:
            return super()._compute_loss(model, inputs)
        if self._step % self.current_gradient_accumulation_steps == 0:
            if self.steady is None:
                self._search([self._tokens(model, each) for each in self._window()])
            else:
                self._clip_to(self.steady)
        loss = super()._compute_loss(model, inputs)
        if self.steady is not None:
            self._trained.append(self._tokens_of(self._log_probs, inputs))
            if (self._step + 1) % self.current_gradient_accumulation_steps == 0:
                self._search(self._trained)
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
        """Ratio, advantages and weights of a micro-batch that is yet to be trained on."""
        if inputs.get("old_per_token_logps") is None:
            return self._tokens_of(torch.zeros_like(inputs["completion_mask"], dtype=torch.float32), inputs)
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        names = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters  # what images need
        others = {name: inputs[name] for name in names if name in inputs}
        self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1), **others)
        return self._tokens_of(self._log_probs, inputs)

    def _tokens_of(self, log_probs: torch.Tensor, inputs: dict) -> tuple[torch.Tensor, ...]:
        """The same from the policy's log-probs, [batch, tokens]; as TRL's loss, without old ones every ratio is 1."""
        old_log_probs = inputs.get("old_per_token_logps")
        ratio = (log_probs - (log_probs if old_log_probs is None else old_log_probs)).exp()
        weight = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        if self.loss_type == "grpo":  # a mean over the tokens of each response
            weight = weight / weight.sum(-1, keepdim=True).clamp(min=1)
        elif self.loss_type == "bnpo":  # a mean over the tokens of each micro-batch
            weight = weight / weight.sum().clamp(min=1)
        advantages = inputs["advantages"]
        advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
        return ratio, advantages.expand_as(ratio), weight

    def _reduced(self, tallies: Iterable[ContributionTally]) -> ContributionTally:
        """Their sum over all processes."""
        return ContributionTally(self.accelerator.reduce(sum(tally.sums for tally in tallies), reduction="sum"))

    def _search(self, window: list[tuple[torch.Tensor, ...]]) -> None:
        """Find bounds by the tokens of an optimizer step: those that it is to use, or that the next one's follow."""
        tally = self._reduced(tally_contributions(*tokens, self.bapo) for tokens in window)
        if self.steady is None:
            used = found = solve_clip_bounds(tally, self.bapo)
            self._clip_to(used)
        else:
            bounds = self.steady.lower.to(tally.sums.device), self.steady.upper.to(tally.sums.device)
            at_bounds = self._reduced(tally_at_bounds(*tokens, *bounds) for tokens in window)
            used, found = measure_clip_bounds(at_bounds, *bounds, self.bapo), self.steady.update(tally)
        names = "positive_share", "positive_token_frac", "clip_frac_positive", "clip_frac_negative"
        metrics = {name: getattr(used, name) for name in names} | {"initial_share": found.initial_share}
        metrics |= {
            "clip_low": used.lower,
            "clip_high": used.upper,
            "found_low": found.lower,
            "found_high": found.upper,
        }
        for name, value in zip(metrics, torch.stack([*metrics.values()]).tolist(), strict=True):  # one host sync
            self._metrics["train"][f"bapo/{name}"].append(value)

    def _clip_to(self, bounds: ClipBounds | SteadyBounds) -> None:
        self.epsilon_low, self.epsilon_high = 1 - bounds.lower.item(), bounds.upper.item() - 1
