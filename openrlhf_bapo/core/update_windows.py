"""The micro-batches of an optimizer step, shown as a whole before the first of them is trained."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


class UpdateWindowLoader(DataLoader):
    """A loader of micro-batches that shows its dataset each optimizer step's window before the window's first one.

    In place of the `DataLoader` that a framework's trainer builds over its replay buffer. The dataset says with
    `update_ends(number of micro-batches)` for each micro-batch whether it is the last one of an update; those after the
    last update are left out. Its `before_update(window)` is called with the window, a list of micro-batches. Without
    such an attribute this is a plain DataLoader.
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
