"""Async training in the loops of OpenRLHF's two actors: the first and last evaluation, and a rollout that fails."""

import inspect
import math
from argparse import Namespace
from queue import Queue
from threading import Lock, Thread

import pytest
import ray
from openrlhf.trainer import ppo_trainer_async
from patience import PATIENCE

from openrlhf_bapo.openrlhf.async_evaluation import answer_with_the_last_step, evaluate_first_and_last_step
from openrlhf_bapo.openrlhf.rollout_faults import save_when_an_async_rollout_fails


def upstream(actor: str, method: str):
    """Return a method of OpenRLHF's actor, without our changes."""
    return inspect.unwrap(getattr(getattr(ppo_trainer_async, actor).__ray_metadata__.modified_class, method))


class Slots(Queue):
    """As many slots as batches may wait: more would let the rollouts run further ahead of the trainer."""

    def put(self, slot: int | tuple | str, block: bool = True) -> None:
        super().put(slot, block=block and not isinstance(slot, int))  # else raises queue.Full


class Actor:
    def __init__(self, run: "Run") -> None:
        self.run, self.args, self.rollout_queue, self.rollout_slots = run, run.args, run.rollouts, run.slots


class Loader(list):
    state_dict = dict


class Generator(Actor):
    fit, _should_eval = (upstream("GenerateSamplesActor", name) for name in ("fit", "_should_eval"))
    prompts_dataloader = eval_dataloader = Loader(["a prompt"])
    _partial_rollout, _last_eval_step, _eval_just_done, generate_kwargs = False, -1, False, {}

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.samples_generator, self.num_rollouts, self.lock = self, 0, Lock()
        acquire, release = lambda: self.lock.acquire(blocking=False), self.lock.release
        self.vllm_lock = Namespace(acquire=Namespace(remote=acquire), release=Namespace(remote=release))

    def generate_samples(self) -> tuple:
        self.num_rollouts += 1
        if self.run.fails == "rollout" and self.num_rollouts > self.run.num_steps:
            raise ValueError("no reward")
        is_last = self.num_rollouts >= self.run.num_steps and self.run.fails != "rollout"
        return ["sample"] * (self.num_rollouts <= self.run.num_steps), None, 1, is_last

    def _run_eval(self) -> dict:
        assert self.lock.locked()
        if self.run.fails == "evaluation":
            raise ValueError("no reward")
        return {"step": self.run.before + self.run.trainer.counted["made"]}


class Trainer(Actor):
    fit, wandb_logger = upstream("TrainingActor", "fit"), None

    def __init__(self, run: "Run") -> None:
        super().__init__(run)
        self.counted, self.tensorboard_logger = {"before": run.before, "made": 0}, self

    def log_eval(self, step: int, metrics: dict) -> None:
        self.run.evaluations.append((step, metrics["step"]))

    def close(self) -> None:
        pass

    def train_step(self, samples: list, step: int) -> tuple[dict, int]:
        self.counted["made"] += 1
        return {}, step + 1

    def save_best_checkpoint(self, metrics: dict, step: int, states: dict) -> None:
        self.run.candidates.append(step)

    def save_logs_and_checkpoints(self, step: int, logs: dict, states: dict) -> None:
        if step % self.args.ckpt.save_steps == 0:
            self.run.saves.append((step, self.counted["made"], self.args.logger.logging_steps))


evaluate_first_and_last_step(Generator)
answer_with_the_last_step(Trainer)
save_when_an_async_rollout_fails(Trainer, Generator)


class Run:
    """A run of `num_steps` training steps from step `before` on. `fails` names the call that raises a ValueError.

    `evaluations` has for each evaluation its step as logged, and that of the weights; `candidates` the steps of those
    that may be the best; `saves` each step that was saved, the steps made then, and the setting of the logs; `errors`
    what the generator raised, and the number of `saves` at that time.
    """

    def __init__(self, num_steps: int, eval_steps: float, queue_size=1, at_start=False, before=0, fails="") -> None:
        self.num_steps, self.before, self.fails = num_steps, before, fails
        self.evaluations, self.candidates, self.saves, self.errors = [], [], [], []
        self.rollouts, self.slots = Queue(queue_size), Slots(queue_size)
        self.args = Namespace(
            train=Namespace(num_episodes=1),
            eval=Namespace(steps=eval_steps, at_start=at_start),
            algo=Namespace(dynamic_filtering_enable=False),
            ckpt=Namespace(save_steps=2),
            logger=Namespace(logging_steps=1),
        )
        for _ in range(queue_size):
            self.slots.put(0)
        generator, self.trainer = Generator(self), Trainer(self)

        def generate() -> None:
            try:
                generator.fit(episode=0, total_consumed_prompts=before)
            except ValueError as error:
                self.errors.append((str(error), len(self.saves)))

        generating = Thread(target=generate, daemon=True)
        generating.start()
        self.trainer.fit(global_step=before)
        generating.join(PATIENCE)
        assert not generator.lock.locked() and self.rollouts.empty()
        assert generator.rollout_queue is self.trainer.rollout_queue is self.rollouts
        assert self.trainer.rollouts_failed == bool(self.errors)


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda result: result)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("eval_steps", [1, 2, 5, math.inf])
@pytest.mark.parametrize("queue_size", [1, 3])
@pytest.mark.parametrize("at_start", [False, True])
def test_the_initial_and_the_last_weights_are_evaluated_once(num_steps, eval_steps, queue_size, at_start):
    run = Run(num_steps, eval_steps, queue_size, at_start)
    steps = [step for step, _ in run.evaluations]
    assert steps == sorted({*steps}) and run.candidates == [step for step in steps if step > 0]
    assert run.evaluations[:at_start] == [(0, 0)] * at_start and (0 in steps) == at_start
    is_due = num_steps % eval_steps == 0
    assert run.evaluations[len(steps) - is_due :] == [(num_steps, num_steps)] * is_due
    assert (num_steps in steps) == is_due and not run.errors


def test_a_resumed_run_without_a_step_left_evaluates_the_last_one_and_saves_no_checkpoint_without_its_data():
    run = Run(0, eval_steps=2, at_start=True, before=4)
    assert (run.evaluations, run.candidates, run.saves) == ([(4, 4)], [], [])


@pytest.mark.parametrize("fails", ["rollout", "evaluation"])
@pytest.mark.parametrize("queue_size", [1, 3])
@pytest.mark.parametrize("num_steps", [0, 4, 5])
def test_a_run_that_fails_trains_on_what_waits_and_saves_its_last_step_once_before_it_raises(
    num_steps, queue_size, fails
):
    run = Run(num_steps, max(num_steps, 1), queue_size, at_start=num_steps == 0, fails=fails)
    saved = [(step, step, 1) for step in range(2, num_steps + 1, 2)]
    saved += [(num_steps, num_steps, math.inf)] * (num_steps % 2)  # logged before
    assert (run.saves, run.errors) == (saved, [("no reward", len(saved))])
