"""A checkpoint where a rollout ends the run: what was trained since the last one is not lost with it."""

import functools
import math
from collections.abc import Callable

from openrlhf.utils.logging_utils import init_logger
from ray.exceptions import RayActorError
from vllm.v1.engine.exceptions import EngineDeadError

logger = init_logger(__name__)

_SAVED = "saved"


def save_when_a_rollout_fails(trainer: type) -> None:
    """Let OpenRLHF's sync trainer write the checkpoint of the last training step before a rollout's error ends it.

    The weights are still that step's. The data's state is that of the step too, so that the failed rollout's prompts
    are drawn again; under a token budget it is today's, as the pool's.
    """
    save_last_step, start = _saving_last_step(trainer), trainer.init_checkpoint_states

    @functools.wraps(start)
    def init_checkpoint_states(self) -> dict:
        generator, states = self.samples_generator, start(self)
        generate, episode = generator.generate_samples, states["episode"]

        def generate_samples(**kwargs):
            nonlocal episode
            try:
                result = generate(**kwargs)
            except Exception:
                save_last_step(self, states_of_today)
                raise
            *_, has_ended = result
            episode += has_ended
            return result

        def states_of_today(states: dict) -> dict:
            if not self.args.partial.token_budget:
                return {}
            return {
                "episode": episode,  # the last step may be of the one before
                "data_loader_state_dict": self.prompts_dataloader.state_dict(),
                "total_consumed_prompts": states["total_consumed_prompts"] + generator._num_prompts,
            }

        generator.generate_samples = generate_samples
        return states

    trainer.init_checkpoint_states = init_checkpoint_states


def save_when_an_async_rollout_fails(trainer: type, generator: type) -> None:
    """As `save_when_a_rollout_fails`: what waits in the queue is trained on before.

    An engine that is dead ends the run at once. It would not take another step's weights.

    Args:
        trainer: OpenRLHF's `TrainingActor`.
        generator: its `GenerateSamplesActor`.
    """
    save_last_step, train, generate = _saving_last_step(trainer), trainer.fit, generator.fit

    @functools.wraps(generate)
    def generate_to_the_end(self, *args, **kwargs) -> None:
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

    @functools.wraps(train)
    def train_to_the_end(self, *args, **kwargs) -> None:
        train(self, *args, **kwargs)
        if not self.rollout_queue.get(block=True):
            save_last_step(self)
            self.rollout_slots.put(_SAVED, block=True)

    trainer.fit, generator.fit = train_to_the_end, generate_to_the_end


def _saving_last_step(trainer: type) -> Callable:
    """What writes the checkpoint of the trainer's last step, unless it is written; `changes(states)` is its data's."""
    save = trainer.save_logs_and_checkpoints

    @functools.wraps(save)
    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        self._last_step = global_step, client_states
        save(self, global_step, logs_dict, client_states)

    def save_last_step(self, changes: Callable[[dict], dict] = lambda _: {}) -> None:
        global_step, states = getattr(self, "_last_step", (0, None))
        ckpt = self.args.ckpt
        if global_step % ckpt.save_steps == 0:
            return
        ckpt.save_steps, self.args.logger.logging_steps = 1, math.inf
        try:
            save(self, global_step, {}, states | changes(states))
        except Exception as error:  # the actors may be gone as well; the rollout's own error is to be heard
            logger.warning(f"no checkpoint of step {global_step} could be written: {error}")

    trainer.save_logs_and_checkpoints = save_logs_and_checkpoints
    return save_last_step
