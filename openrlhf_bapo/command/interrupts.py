"""What ends a run from outside its trainer: SIGTERM and Ctrl-C, and an engine that does not start.

After a signal the training step under way is finished and saved; a second one ends the run at once.
"""

import functools
import os
import signal
import sys
import threading
import time
from types import ModuleType

import wrapt

from openrlhf_bapo.openrlhf.interrupts import interrupt_trainer

_FAILED = signal.SIGUSR1
"""From a thread of this process to its main thread, which waits for Ray."""


def catch_signals(came: list[int], finishes_step: bool) -> None:
    """Catch SIGTERM and SIGINT from now on in the process that has started Ray.

    Args:
        came: gets the signals' numbers as they come.
        finishes_step: `--ckpt.on_interrupt`; else the first signal ends the run at once.
    """

    def handle(number: int, _) -> None:
        came.append(number)
        if len(came) > 1 or not finishes_step:
            raise KeyboardInterrupt  # what gets through Ray
        name = signal.Signals(number).name
        print(
            f"openrlhf-bapo: {name}: ends after this training step, with a checkpoint; a second signal ends at once",
            file=sys.stderr,
            flush=True,
        )
        threading.Thread(target=interrupt_trainer, daemon=True).start()  # a handler must not wait

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    signal.signal(_FAILED, signal.default_int_handler)


def leave_signals() -> None:
    """The run ends: another signal ends the process at once."""
    signal.signal(_FAILED, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def watch_engines(engines: list, failures: list[BaseException]) -> None:
    """Let an engine that does not start end the run, where its actors would wait for it for ever.

    Args:
        engines: gets the engines' handles.
        failures: gets the exception that Ray carries home.
    """

    def watched(create_vllm_engines):
        @functools.wraps(create_vllm_engines)
        def create(*args, **kwargs) -> list:
            engines.extend(create_vllm_engines(*args, **kwargs))
            threading.Thread(target=wait, daemon=True).start()
            return list(engines)

        return create

    def wait() -> None:
        import ray

        try:
            ray.get([engine.check_health.remote() for engine in engines])  # answered when they have started
        except Exception as error:
            failures.append(error)
            os.kill(os.getpid(), _FAILED)

    def use(ray_parts: ModuleType) -> None:
        ray_parts.create_vllm_engines = watched(ray_parts.create_vllm_engines)

    wrapt.register_post_import_hook(use, "openrlhf.trainer.ray")


def find_dead_engine(engines: list) -> BaseException | None:
    """What Ray carries home of an engine that has died, if one has; the actors know only that a connection broke."""
    import ray

    time.sleep(1)  # the connection may break before vLLM sees its process end
    try:
        ray.get([engine.check_health.remote() for engine in engines], timeout=10)
    except ray.exceptions.GetTimeoutError:
        return None  # busy
    except Exception as error:
        return error
