"""Lets OpenRLHF's trainer end after the training step under way, with a checkpoint, when the command asks for it.

The command gets the signal, a Ray actor makes the steps: a key in Ray's own store tells one of the other.
"""

import functools

_KEY, _NAMESPACE = b"interrupted", b"openrlhf_bapo"


class Interrupted(Exception):
    """Ends the trainer after a step that was saved; the message says which."""


def interrupt_trainer() -> None:
    """Ask the trainer of this Ray job to end."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(_job() + _KEY, b"", namespace=_NAMESPACE)


def _is_interrupted() -> bool:
    from ray.experimental import internal_kv

    return internal_kv._internal_kv_exists(_job() + _KEY, namespace=_NAMESPACE)


def _job() -> bytes:
    import ray

    return ray.get_runtime_context().get_job_id().encode()


def end_when_interrupted(trainer: type) -> None:
    """Let OpenRLHF's trainer look after every step, and before the first one, whether it is to end."""
    save, start = trainer.save_logs_and_checkpoints, trainer.init_checkpoint_states

    @functools.wraps(save)
    def save_logs_and_checkpoints(self, global_step: int, *args, **kwargs) -> None:
        interrupted = _is_interrupted()
        if interrupted:
            self.args.ckpt.save_steps = 1
        save(self, global_step, *args, **kwargs)
        if interrupted:
            raise Interrupted(f"after step {global_step}")

    @functools.wraps(start)
    def init_checkpoint_states(self) -> dict:
        if _is_interrupted():
            raise Interrupted("before its first step")
        return start(self)

    trainer.save_logs_and_checkpoints, trainer.init_checkpoint_states = (
        save_logs_and_checkpoints,
        init_checkpoint_states,
    )
