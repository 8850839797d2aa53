"""Counts the training steps that a run makes, and the prompt groups that it does not train on.

The trainer and the samples generator, which are two processes in async training, put their counts into the job's store.
The command reads them for its last line.
"""

import math
from typing import Any

from openrlhf_bapo.openrlhf import job_store
from openrlhf_bapo.openrlhf.registration import in_place_of

PLANNED, STEPS, GROUPS = b"planned", b"steps", b"groups"
"""Keys of the store: planned training steps; counts of steps; groups that were not trained on, by reason."""


class NothingTrained(Exception):
    """The run reached the end of its data without an optimizer step of the actor."""


def planned_steps(args: Any, num_prompts: int) -> int:
    """Return the training steps of a run that trains on every one of an episode's `num_prompts` prompts.

    Each episode's last step may have fewer prompts.
    """
    per_step = min(args.rollout.batch_size, args.rollout.vllm_generate_batch_size or math.inf)
    return args.train.num_episodes * math.ceil(num_prompts / per_step)


def note_groups(actor: Any) -> None:
    """Note the planned steps, and how many prompt groups an actor's samples generator has left out, by reason."""
    job_store.put(PLANNED, planned_steps(actor.args, len(actor.prompts_dataloader.dataset)))
    job_store.put(GROUPS, actor.samples_generator.untrained)


def count_steps(trainer: type[Any]) -> None:
    """Make OpenRLHF's trainer count its steps, and end with NothingTrained if it has trained nothing."""

    @in_place_of(trainer, "init_checkpoint_states")
    def init_checkpoint_states(start: Any, self: Any) -> dict:
        states = start(self)
        self.counted = {
            "before": states["global_step"],
            "made": 0,
            "critic_alone": 0,
            "updates": 0,
            "updates_skipped": 0,
        }
        job_store.put(STEPS, self.counted)
        return states

    @in_place_of(trainer, "ppo_train")
    def ppo_train(train: Any, self: Any, *args: Any, **kwargs: Any) -> dict:
        status = train(self, *args, **kwargs)
        # They are missing while --critic.freezing_steps lets only the critic train.
        self.counted["critic_alone"] += "optimizer_steps_taken" not in status
        updates = status.pop("optimizer_steps_taken", 0)
        self.experience_maker.num_optimizer_steps += updates
        self.counted["made"] += 1
        self.counted["updates"] += updates
        self.counted["updates_skipped"] += int(status.get("offpolicy/updates_skipped", 0))
        job_store.put(STEPS, self.counted)
        return status

    @in_place_of(trainer, "fit")
    def fit_and_look(fit: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        fit(self, *args, **kwargs)
        counted = self.counted
        if getattr(self, "rollouts_failed", False):
            return  # in async training, where the other actor raises the error
        trains = counted["made"] == 0 or counted["updates_skipped"] > 0  # not only the critic
        if counted["before"] == 0 and counted["updates"] == 0 and trains:
            raise NothingTrained
