"""Ends OpenRLHF's trainer after the current training step, with a checkpoint, when the command asks for it.

The command receives the signal, and a Ray actor trains. The command tells the actor through a key in Ray's own store.
"""

from typing import Any

from openrlhf_bapo.openrlhf import job_store
from openrlhf_bapo.openrlhf.registration import in_place_of

_INTERRUPTED, _TRAINING = b"interrupted", b"training"


class Interrupted(Exception):
    """The trainer ends after a step that was saved. The message names the step."""


def interrupt_trainer() -> None:
    """Ask the trainer of this Ray job to end after its current step."""
    job_store.put(_INTERRUPTED)


def is_interrupted() -> bool:
    """Say whether the trainer of this Ray job was asked to end."""
    return bool(job_store.get(_INTERRUPTED))


def is_training() -> bool:
    """Say whether the trainer of this Ray job has begun, so that it will see that it was asked to end."""
    return bool(job_store.get(_TRAINING))


def end_when_interrupted(trainer: type[Any]) -> None:
    """Make OpenRLHF's trainer check before the first step and after every step whether it was asked to end."""

    @in_place_of(trainer, "save_logs_and_checkpoints")
    def save_logs_and_checkpoints(save: Any, self: Any, global_step: int, *args: Any, **kwargs: Any) -> None:
        interrupted = is_interrupted()
        if interrupted:
            self.args.ckpt.save_steps = 1
        save(self, global_step, *args, **kwargs)
        if interrupted:
            raise Interrupted(f"after step {global_step}")

    @in_place_of(trainer, "init_checkpoint_states")
    def init_checkpoint_states(start: Any, self: Any) -> dict:
        job_store.put(_TRAINING)  # before the check, so that one of the two sees a signal that comes now
        if is_interrupted():
            raise Interrupted("before its first step")
        return start(self)
