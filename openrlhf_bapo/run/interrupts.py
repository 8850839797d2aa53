"""Ends a run from outside its trainer: after SIGTERM or Ctrl-C, or if an engine does not start.

After a signal the current training step is finished and saved. A second signal ends the run at once.
"""

import functools
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

import wrapt

from openrlhf_bapo.openrlhf.interrupts import Interrupted, interrupt_trainer, is_training
from openrlhf_bapo.run.threads import is_ending, start_thread

_FAILED = signal.SIGUSR1
"""Sent by a thread of this process to its main thread, which waits for Ray."""


def catch_signals(came: list[int], failures: list[BaseException], finishes_step: bool) -> None:
    """Catch SIGTERM and SIGINT from now on, in the process that has started Ray.

    A run that is not training yet, because it waits for GPUs, engines or models, ends at once.

    Args:
        came: the list that gets the number of each signal.
        failures: the list that gets an exception if the run ends before its training.
        finishes_step: `--ckpt.on_interrupt`; without it, the first signal ends the run at once.
    """

    def ask(name: str) -> None:
        interrupt_trainer()
        if is_training():
            says = "ends after this training step, with a checkpoint; a second signal ends at once"
            print(f"openrlhf-bapo: {name}: {says}", file=sys.stderr, flush=True)
        else:
            failures.append(Interrupted("before its first step"))
            os.kill(os.getpid(), _FAILED)

    def handle(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1 or not finishes_step:
            raise KeyboardInterrupt  # Ray lets it through
        name = signal.Signals(number).name
        start_thread(ask, name)  # a signal handler must not wait

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    signal.signal(_FAILED, signal.default_int_handler)


def leave_signals() -> None:
    """Let another signal end the process at once, because the run is ending."""
    signal.signal(_FAILED, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def watch_engines(engines: list, failures: list[BaseException]) -> None:
    """End the run if an engine does not start. The run's actors would otherwise wait for the engine forever.

    `engines` gets the engines' handles, and `failures` the exception of one that does not start.
    """

    def wait() -> None:
        import ray

        try:
            starting = [engine.check_health.remote() for engine in engines]  # an engine answers when it has started
            while starting and not is_ending():
                started, starting = ray.wait(starting, timeout=1.0)
                ray.get(started)
        except Exception as error:
            failures.append(error)
            os.kill(os.getpid(), _FAILED)

    def use(ray_parts: Any) -> None:
        create_vllm_engines = ray_parts.create_vllm_engines

        @functools.wraps(create_vllm_engines)
        def create(*args: Any, **kwargs: Any) -> list:
            engines.extend(create_vllm_engines(*args, **kwargs))
            start_thread(wait)
            return list(engines)

        ray_parts.create_vllm_engines = create

    wrapt.register_post_import_hook(use, "openrlhf.trainer.ray")


def find_dead_engine(engines: list) -> BaseException | None:
    """Return the exception of an engine that has died, if any. The actors know only that a connection broke."""
    import ray

    time.sleep(1)  # a connection may break before vLLM notices that its process has ended
    try:
        ray.get([engine.check_health.remote() for engine in engines], timeout=10)
    except ray.exceptions.GetTimeoutError:
        return None  # an engine is busy
    except Exception as error:
        return error
    return None
