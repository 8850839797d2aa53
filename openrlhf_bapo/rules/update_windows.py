"""The window of an optimizer step: all its micro-batches, which a rule may tally before the first is trained on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from openrlhf_bapo.rules.rule_loss import ClipRuleLoss, Timer


class UpdateWindows:
    """The updates of a framework's trainer, which a rule closes with the tally of all micro-batches on all ranks.

    A rule that needs the tally first gets it in one of three ways. With one micro-batch per step, the loss tallies the
    ratios that it computes anyway. With more, the ratios come from a forward pass without gradient over the window. The
    first step of a pass needs no forward if the framework has just computed the log-probs with the same weights. The
    other rules tally in the loss, and close the update when its step ended.

    Args:
        loss: the framework's loss with the rule.
        known: returns the log-probs of a micro-batch under the weights that the pass begins with; None if not known.
        forward: computes the log-probs of a micro-batch under the present weights.
        tally: adds a micro-batch with these log-probs to the loss's running update.
    """

    def __init__(
        self,
        loss: ClipRuleLoss,
        known: Callable[[Any], torch.Tensor | None],
        forward: Callable[[Any], torch.Tensor],
        tally: Callable[[Any, torch.Tensor], None],
    ) -> None:
        self._loss, self._known_log_probs, self._log_probs, self._add = loss, known, forward, tally
        self.begin()

    def begin(self) -> None:
        """Hear that a pass over the replay buffer begins."""
        self._is_first = True
        self._timers: list[Timer] = []

    @torch.no_grad()
    def before_update(self, window: list[Any]) -> None:
        """Tally an update's micro-batches, which are moved to the GPU, if the rule needs that; every rank must call."""
        if not self._loss.rule.needs_tally_first:
            return
        is_first, self._is_first = self._is_first, False
        if len(window) == 1:
            self._loss.search_in_each_call()
            return
        for micro_batch in window:
            micro_batch.to_device(torch.cuda.current_device())
            log_probs = self._known_log_probs(micro_batch) if is_first else None
            if log_probs is None:
                self._timers.append(timer := Timer())
                with timer:
                    log_probs = self._log_probs(micro_batch)
            self._add(micro_batch, log_probs)
        self._loss.close_update()

    def after_update(self, is_skipped: bool) -> None:
        """Close the update whose optimizer step ended; every rank must call."""
        if not self._loss.rule.needs_tally_first:
            self._loss.close_update(is_skipped)
        self._loss.entropy_rule.close_update(is_skipped)

    def end(self) -> dict[str, float]:
        """Return the metrics of the pass's updates, and the seconds that the rule took; every rank must call."""
        metrics, seconds, rule = self._loss.take_metrics(), self._loss.take_seconds(), self._loss.rule
        if rule.searches:
            metrics["timing/bapo_search"] = seconds
            if rule.config.scope == "update":
                metrics["timing/bapo_ratio_forward"] = sum(timer.seconds() for timer in self._timers)
        return metrics


class UpdateWindowLoader(DataLoader):
    """A `DataLoader` that shows its dataset the window of each optimizer step, which is a list of micro-batches.

    It replaces the `DataLoader` that a framework's trainer builds over its replay buffer. The loader calls the
    dataset's `before_update(window)` before it yields the window's first micro-batch. The dataset's
    `update_ends(number of micro-batches)` says for each micro-batch whether it ends an update. Micro-batches after the
    last update are left out. If the dataset has no `before_update`, this is a plain `DataLoader`.
    """

    dataset: Any

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a private iterator class
        micro_batches = super().__iter__()
        if not hasattr(self.dataset, "before_update"):
            return micro_batches
        return self._windows(micro_batches)

    def _windows(self, micro_batches: Iterator[Any]) -> Iterator[Any]:
        ends = self.dataset.update_ends(len(self))
        window = []
        for micro_batch, end in zip(micro_batches, ends, strict=True):
            window.append(micro_batch)
            if end:
                self.dataset.before_update(window)
                yield from window
                window = []
