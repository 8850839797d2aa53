"""Async training evaluates before its first and after its last step, in the loops of OpenRLHF's two actors."""

import inspect
import itertools
from argparse import Namespace
from queue import Queue
from threading import Thread

import pytest
import ray
from openrlhf.trainer import ppo_trainer_async
from patience import PATIENCE

from openrlhf_bapo.openrlhf.async_evaluation import answer_with_the_last_step, evaluate_first_and_last_step


def upstream(actor: str, method: str):
    """Return a method of OpenRLHF's actor, without our changes."""
    return inspect.unwrap(getattr(getattr(ppo_trainer_async, actor).__ray_metadata__.modified_class, method))


class Slots(Queue):
    """As many slots as batches may wait: more would let the rollouts run further ahead of the trainer."""

    def put(self, slot: int | tuple, block: bool = True) -> None:
        super().put(slot, block=isinstance(slot, tuple))  # else raises queue.Full


def train(num_steps: int, eval_steps: int, queue_size: int, at_start: bool, before: int = 0) -> tuple[list, list]:
    """Train from step `before` on.

    Returns:
        For each evaluation its step as logged, and that of the weights; the steps of those that may be the best.
    """
    evaluations, candidates, places = [], [], itertools.count(1)
    args = Namespace(
        train=Namespace(num_episodes=1),
        eval=Namespace(steps=eval_steps, at_start=at_start),
        algo=Namespace(dynamic_filtering_enable=False),
    )
    remote = Namespace(remote=lambda: None)

    class Generator:
        fit, _should_eval = (upstream("GenerateSamplesActor", name) for name in ("fit", "_should_eval"))
        samples_generator = Namespace(
            generate_samples=lambda: (["sample"] * ((place := next(places)) <= num_steps), None, 1, place >= num_steps)
        )
        vllm_lock = Namespace(acquire=remote, release=remote)
        _partial_rollout, _last_eval_step, _eval_just_done, generate_kwargs = False, -1, False, {}

        def _run_eval(self) -> dict:
            return {"step": before + trainer.counted["made"]}

    class Loader(list):
        state_dict = dict

    class Trainer:
        fit = upstream("TrainingActor", "fit")
        counted, wandb_logger = {"before": before, "made": 0}, None
        tensorboard_logger = Namespace(
            log_eval=lambda step, metrics: evaluations.append((step, metrics["step"])), close=lambda: None
        )

        def train_step(self, samples: list, step: int) -> tuple[dict, int]:
            self.counted["made"] += 1
            return {}, step + 1

        def save_best_checkpoint(self, metrics: dict, step: int, states: dict) -> None:
            candidates.append(step)

        def save_logs_and_checkpoints(self, *_) -> None:
            pass

    evaluate_first_and_last_step(Generator)
    answer_with_the_last_step(Trainer)
    generator, trainer = Generator(), Trainer()
    rollouts, slots = Queue(queue_size), Slots(queue_size)
    for actor in (generator, trainer):
        actor.args, actor.rollout_queue, actor.rollout_slots = args, rollouts, slots
    generator.prompts_dataloader = generator.eval_dataloader = Loader(["a prompt"])
    for _ in range(queue_size):
        slots.put(0)
    generating = Thread(target=generator.fit, kwargs=dict(episode=0, total_consumed_prompts=before), daemon=True)
    generating.start()
    trainer.fit(global_step=before)
    generating.join(PATIENCE)
    assert rollouts.empty() and generator.rollout_queue is trainer.rollout_queue is rollouts
    return evaluations, candidates


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda _: None)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("eval_steps", [1, 2, 5, float("inf")])
@pytest.mark.parametrize("queue_size", [1, 3])
@pytest.mark.parametrize("at_start", [False, True])
def test_the_initial_and_the_last_weights_are_evaluated_once(num_steps, eval_steps, queue_size, at_start):
    evaluations, candidates = train(num_steps, eval_steps, queue_size, at_start)
    steps = [step for step, _ in evaluations]
    assert steps == sorted({*steps}) and candidates == [step for step in steps if step > 0]
    assert evaluations[:at_start] == [(0, 0)] * at_start and (0 in steps) == at_start
    is_due = num_steps % eval_steps == 0
    assert evaluations[len(steps) - is_due :] == [(num_steps, num_steps)] * is_due and (num_steps in steps) == is_due


def test_a_resumed_run_without_a_step_left_evaluates_the_last_one_and_saves_no_checkpoint_without_its_data():
    assert train(0, 2, 1, at_start=True, before=4) == ([(4, 4)], [])
