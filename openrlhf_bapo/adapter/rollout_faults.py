"""A checkpoint where a rollout ends the run: what was trained since the last one is not lost with it."""

import functools
import math

from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


def save_when_a_rollout_fails(trainer: type) -> None:
    """Let OpenRLHF's sync trainer write the checkpoint of the last training step before a rollout's error ends it.

    The weights are still that step's. The data's state is that of the step too, so that the failed rollout's prompts
    are drawn again; under a token budget it is today's, as the pool's.
    """
    save, start = trainer.save_logs_and_checkpoints, trainer.init_checkpoint_states

    @functools.wraps(save)
    def save_logs_and_checkpoints(self, global_step: int, logs_dict=None, client_states=None) -> None:
        self._last_step = global_step, client_states
        save(self, global_step, logs_dict, client_states)

    @functools.wraps(start)
    def init_checkpoint_states(self) -> dict:
        generator, self._last_step = self.samples_generator, None
        generate = generator.generate_samples

        def generate_samples(**kwargs):
            try:
                return generate(**kwargs)
            except Exception:
                save_last_step(self)
                raise

        generator.generate_samples = generate_samples
        return start(self)

    def save_last_step(self) -> None:
        if self._last_step is None:
            return
        global_step, states = self._last_step
        ckpt = self.args.ckpt
        if global_step % ckpt.save_steps == 0:
            return
        if self.args.partial.token_budget:
            states = states | {
                "data_loader_state_dict": self.prompts_dataloader.state_dict(),
                "total_consumed_prompts": states["total_consumed_prompts"] + self.samples_generator._num_prompts,
            }
        ckpt.save_steps, self.args.logger.logging_steps = 1, math.inf
        try:
            save(self, global_step, {}, states)
        except Exception as error:  # the actors may be gone as well; the rollout's own error is to be heard
            logger.warning(f"no checkpoint of step {global_step} could be written: {error}")

    trainer.save_logs_and_checkpoints = save_logs_and_checkpoints
    trainer.init_checkpoint_states = init_checkpoint_states
