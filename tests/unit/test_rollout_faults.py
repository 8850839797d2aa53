"""The last step is saved when a rollout or an evaluation fails. If an async run's engine is dead, the run just ends."""

import math
from argparse import Namespace
from queue import Queue

import pytest
from ray.exceptions import RayActorError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_bapo.openrlhf.rollout_faults import save_when_a_rollout_fails, save_when_an_async_rollout_fails


def make_trainer(rollout):
    """Return a sync trainer that saves every second step and notes its settings at each save."""

    class Trainer:
        def __init__(self) -> None:
            logger, partial = Namespace(logging_steps=1), Namespace(token_budget=0)
            self.args = Namespace(ckpt=Namespace(save_steps=2), logger=logger, partial=partial)
            self.samples_generator, self.saves = Namespace(generate_samples=rollout), []

        def init_checkpoint_states(self) -> dict:
            return {"episode": 0}

        def save_logs_and_checkpoints(self, global_step, logs_dict=None, client_states=None) -> None:
            self.saves.append((global_step, self.args.ckpt.save_steps, self.args.logger.logging_steps, client_states))

        def evaluate(self, global_step, **generate_kwargs) -> dict:
            return rollout(**generate_kwargs)

    save_when_a_rollout_fails(Trainer)
    trainer = Trainer()
    trainer.init_checkpoint_states()
    return trainer


def fail(**_):
    raise ValueError("no reward")


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("step", [3, 4])
def test_the_last_step_is_saved_once_and_logged_once(step, evaluates):
    trainer, states = make_trainer(fail), {"episode": 0, "global_step": step}
    trainer.save_logs_and_checkpoints(step, {}, states)
    with pytest.raises(ValueError, match="no reward"):
        trainer.evaluate(step) if evaluates else trainer.samples_generator.generate_samples()
    again = [(step, 1, math.inf, states)] if step % 2 else []  # with these settings OpenRLHF saves, and logs nothing
    assert trainer.saves == [(step, 2, 1, states), *again]


def test_an_evaluation_that_fails_before_the_first_step_saves_nothing():
    trainer = make_trainer(fail)
    with pytest.raises(ValueError, match="no reward"):
        trainer.evaluate(0)
    assert not trainer.saves


def test_under_a_token_budget_the_prompts_of_the_failed_rollout_count_as_drawn():
    """The saved pool has their responses. The last step may be of the episode before."""
    rollouts = iter([([], None, 0, True), ([], None, 0, False)])
    trainer = make_trainer(lambda **_: next(rollouts, None) or fail())
    trainer.args.partial.token_budget, trainer.samples_generator.num_drawn = 9, 5
    trainer.prompts_dataloader = Namespace(state_dict=lambda: "after the failed rollout")
    states = {"episode": 0, "global_step": 3, "total_consumed_prompts": 7, "data_loader_state_dict": "after step 3"}
    trainer.save_logs_and_checkpoints(3, {}, states)
    with pytest.raises(ValueError, match="no reward"):
        for _ in range(3):
            trainer.samples_generator.generate_samples()
    *_, saved = trainer.saves[-1]
    of_pool = {"episode": 1, "total_consumed_prompts": 12, "data_loader_state_dict": "after the failed rollout"}
    assert saved == states | of_pool


def test_a_step_that_cannot_be_saved_is_said_and_the_rollouts_error_is_raised(caplog):
    trainer = make_trainer(fail)
    trainer.save_logs_and_checkpoints(3, {}, {})
    trainer.saves = None  # no further one
    with pytest.raises(ValueError, match="no reward"):
        trainer.evaluate(3)
    assert "no checkpoint of step 3 could be written: 'NoneType' object" in caplog.text


def make_generator(error):
    """Return an async generator whose rollouts fail with an error, or succeed without one."""

    class Generator:
        def __init__(self) -> None:
            self.rollout_queue, self.rollout_slots = Queue(), Queue()

        def fit(self) -> None:
            if error:
                raise error

    class Trainer:
        fit = save_logs_and_checkpoints = Generator.fit

    save_when_an_async_rollout_fails(Trainer, Generator)
    return Generator()


@pytest.mark.parametrize("error", [RayActorError(), EngineDeadError()], ids=lambda error: type(error).__name__)
def test_a_dead_engine_ends_an_async_run_at_once(error):
    generator = make_generator(error)
    generator.rollout_slots.put("saved")  # should it wait all the same
    with pytest.raises(type(error)):
        generator.fit()
    assert generator.rollout_queue.empty()
