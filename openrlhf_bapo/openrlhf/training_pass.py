"""What a pass over OpenRLHF's replay buffer consists of for `BapoActorTrainer`: its moments, in one interface."""

from typing import Any


class PassPart:
    """One concern of a training pass, told of the pass's moments by its trainer. What is not overridden does nothing.

    Args:
        trainer: the `BapoActorTrainer` of this rank.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def begin(self) -> None:
        """Hear that a pass begins, before its first micro-batch."""

    def before_loss(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments for the call of the loss, `PolicyLoss.forward`'s, in place of the given ones."""
        return args, kwargs

    def after_loss(self, args: tuple, kwargs: dict) -> None:
        """Hear that the loss was called with these arguments; its bounds are still those of the call."""

    def after_update(self, is_skipped: bool) -> None:
        """Hear that an optimizer step ended, which DeepSpeed may have skipped; the same on every rank."""

    def end(self) -> dict[str, float]:
        """Return this part's metrics of the pass, which every rank asks for."""
        return {}
