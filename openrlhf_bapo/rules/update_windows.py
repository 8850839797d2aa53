"""A loader that shows all micro-batches of an optimizer step before the step trains on the first of them."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


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
