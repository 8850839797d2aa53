"""Evaluates before the first and after the last step of async training too.

OpenRLHF's generator evaluates when it takes a slot that carries such a step. It takes no slot after its last rollout,
so the steps after that rollout, the last one among them, would never be evaluated.

Before it says "done", the generator here asks for the trainer's last step. The trainer answers when it has trained on
all waiting rollouts. For example, with two rollouts, a queue of one batch, and an evaluation every second step:

    rollouts:  ("eval", 0, metrics), batch 1, batch 2, "step", ("eval", 2, metrics), "done"
    slots:     0, 0, 0, 1, ("step", 2), 2                                   (OpenRLHF's slots are global steps)
"""

from types import SimpleNamespace
from typing import Any

import ray

from openrlhf_bapo.openrlhf.registration import in_place_of

_STEP = "step"


def evaluate_first_and_last_step(generator: type[Any]) -> None:
    """Make the generator evaluate at the start (`--eval.at_start`), and after the last step if one is due then."""

    @in_place_of(generator, "fit")
    def fit_and_evaluate(fit: Any, self: Any, episode: int, total_consumed_prompts: int) -> None:
        queue = self.rollout_queue

        def put(payload: Any, block: bool) -> None:
            if payload == "done":
                queue.put(_STEP, block=True)
                while not isinstance(answer := self.rollout_slots.get(block=True), tuple):
                    pass  # a slot that no rollout needs any more
                _, step = answer
                if self._should_eval(step):
                    evaluate(step)
            queue.put(payload, block=block)

        def evaluate(step: int) -> None:
            ray.get(self.vllm_lock.acquire.remote())
            try:
                metrics = self._run_eval()
            finally:
                ray.get(self.vllm_lock.release.remote())
            queue.put(("eval", step, metrics), block=True)

        if self.args.eval.at_start and total_consumed_prompts == 0 and self.eval_dataloader:
            self.rollout_slots.get(block=True)  # the trainer puts it back
            evaluate(0)
        self.rollout_queue = SimpleNamespace(put=put)
        try:
            fit(self, episode, total_consumed_prompts)
        finally:
            self.rollout_queue = queue


def answer_with_the_last_step(trainer: type[Any]) -> None:
    """Make the trainer answer the generator, and save no best checkpoint before its first step.

    OpenRLHF would save one without the state of the data, which no run could resume.
    """

    @in_place_of(trainer, "fit")
    def fit_and_answer(fit: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        queue = self.rollout_queue

        def get(block: bool) -> Any:
            payload = queue.get(block=block)
            if payload == _STEP:
                self.rollout_slots.put((_STEP, self.counted["before"] + self.counted["made"]), block=True)
                payload = queue.get(block=block)
            return payload

        self.rollout_queue = SimpleNamespace(get=get)
        try:
            fit(self, *args, **kwargs)
        finally:
            self.rollout_queue = queue

    @in_place_of(trainer, "save_best_checkpoint")
    def save_best_checkpoint(save: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if self.counted["made"]:
            save(self, *args, **kwargs)
