"""Writes a checkpoint of the last training step when a failed rollout or evaluation ends the run."""

import math
from collections.abc import Callable
from typing import Any

from openrlhf.utils.logging_utils import init_logger
from ray.exceptions import RayActorError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_bapo.openrlhf.registration import in_place_of

logger = init_logger(__name__)

_SAVED = "saved"  # put into the queue of slots, see `save_when_an_async_rollout_fails`


def save_when_a_rollout_fails(trainer: type[Any]) -> None:
    """Make OpenRLHF's sync trainer save its last training step if a rollout or an evaluation raises an error.

    The weights are still those of that step. The state of the data loader is that of the step too, so that a resumed
    run draws the failed rollout's prompts again. Under a token budget it is the current state, because the saved pool
    contains these prompts.
    """
    save_last_step = _saving_last_step(trainer)

    @in_place_of(trainer, "init_checkpoint_states")
    def init_checkpoint_states(start: Any, self: Any) -> dict:
        generator, states = self.samples_generator, start(self)
        generate, episode = generator.generate_samples, states["episode"]

        def generate_samples(**kwargs: Any) -> Any:
            nonlocal episode
            try:
                result = generate(**kwargs)
            except Exception:
                save_last_step(self, current_states)
                raise
            *_, has_ended = result
            episode += has_ended
            return result

        def current_states(states: dict) -> dict:
            if not self.args.partial.token_budget:
                return {}
            return {
                "episode": episode,  # the last step may belong to the episode before
                "data_loader_state_dict": self.prompts_dataloader.state_dict(),
                "total_consumed_prompts": states["total_consumed_prompts"] + generator.num_drawn,
            }

        generator.generate_samples = generate_samples
        return states

    @in_place_of(trainer, "evaluate")
    def evaluate(upstream: Any, self: Any, *args: Any, **kwargs: Any) -> dict:
        try:
            return upstream(self, *args, **kwargs)
        except Exception:
            save_last_step(self)
            raise


def save_when_an_async_rollout_fails(trainer: type[Any], generator: type[Any]) -> None:
    """Do the same in async training, where the generator evaluates, after the trainer has trained on waiting batches.

    The two actors tell each other through OpenRLHF's queues. At the end, the generator puts "done" into the queue of
    rollouts, which ends the trainer's `fit`, and then one value more: True if all rollouts succeeded, and False if one
    failed. After False the trainer saves, and puts `_SAVED` into the queue of slots. The generator waits for it before
    it raises the error. For example, with a queue of one batch, if the third rollout fails:

        rollouts:  batch 1, batch 2, "done", False
        slots:     0, 0, 1, "saved"                   (OpenRLHF's slots are global steps)

    A dead engine ends the run at once, because the trainer could not publish the weights of another step to it.
    """
    save_last_step = _saving_last_step(trainer)

    @in_place_of(generator, "fit")
    def generate_to_the_end(generate: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            generate(self, *args, **kwargs)
        except (RayActorError, EngineDeadError):
            raise
        except Exception:
            self.rollout_queue.put("done", block=True)
            self.rollout_queue.put(False, block=True)
            while self.rollout_slots.get(block=True) != _SAVED:
                pass
            raise
        self.rollout_queue.put(True, block=True)

    @in_place_of(trainer, "fit")
    def train_to_the_end(train: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        train(self, *args, **kwargs)
        self.rollouts_failed = not self.rollout_queue.get(block=True)
        if self.rollouts_failed:
            save_last_step(self)
            self.rollout_slots.put(_SAVED, block=True)


def _saving_last_step(trainer: type[Any]) -> Callable:
    """Record the trainer's last step, and return a function that saves it unless it has been saved.

    That function's argument `changes` maps the step's client states to the entries that replace some of them.
    """
    save = trainer.save_logs_and_checkpoints

    @in_place_of(trainer, "save_logs_and_checkpoints")
    def save_logs_and_checkpoints(
        _: Any, self: Any, global_step: int, logs_dict: dict | None = None, client_states: dict | None = None
    ) -> None:
        self._last_step = global_step, client_states
        save(self, global_step, logs_dict, client_states)

    def save_last_step(self: Any, changes: Callable[[dict], dict] = lambda _: {}) -> None:
        global_step, states = getattr(self, "_last_step", (0, {}))
        ckpt = self.args.ckpt
        if global_step % ckpt.save_steps == 0:
            return
        ckpt.save_steps, self.args.logger.logging_steps = 1, math.inf
        try:
            save(self, global_step, {}, states | changes(states))
        except Exception as error:  # the actors may have died too, and the rollout's error must be raised
            logger.warning(f"no checkpoint of step {global_step} could be written: {error}")

    return save_last_step
