"""Runs `openrlhf.cli.train_ppo_ray` with BAPO: its flags and ours, in the same Ray pipeline."""

import argparse
import functools
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from openrlhf_bapo.flags.arguments import run_upstream
from openrlhf_bapo.openrlhf.replay_checkpoint import use_checkpoint
from openrlhf_bapo.run.interrupts import catch_signals, find_dead_engine, leave_signals, watch_engines
from openrlhf_bapo.run.plan import warn_of_small_disks
from openrlhf_bapo.run.summary import describe_training
from openrlhf_bapo.run.threads import end_threads


def main(argv: list[str] | None = None) -> None:
    """Train. Flags come from `argv`, or from the command line; a mistake ends with one line and exit code 2.

    After any other failure, the last lines on stderr name the cause and what is saved. The exit code is then 1, 143
    after SIGTERM, or 130 after Ctrl-C. A run that trains nothing is a failure.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background commands ignore SIGINT
    values: dict[str, Any] = {}
    signals: list[int] = []
    failures: list[BaseException] = []
    engines: list[Any] = []
    started: list[bool] = []
    watch_engines(engines, failures)

    def prepare(args: argparse.Namespace) -> None:
        warn_of_small_disks(args)
        use_checkpoint(args)
        _prepare_ray(args, signals, failures)
        values.update(vars(args))

    try:
        run_upstream(sys.argv[1:] if argv is None else argv, prepare, start=lambda: started.append(True))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not started:
            sys.exit(128 + signal.SIGINT)
        if not started or isinstance(error, SystemExit):
            raise
        if not failures and isinstance(error, RuntimeError):  # such as a broken connection
            error = find_dead_engine(engines) or error
        _end(failures[0] if failures else error, values, signals)
    trained = describe_training(values)
    end_threads()
    print(f"openrlhf-bapo: the run is complete: {trained}; its model is in {values['ckpt.output_dir']}", flush=True)


def _end(error: BaseException, values: dict, signals: list[int]) -> NoReturn:
    """Print the cause of the end after all output of the processes, and exit."""
    import ray

    from openrlhf_bapo.run.failures import describe_failure

    leave_signals()
    traceback.print_exception(error)
    lines = describe_failure(error, values, signals)
    end_threads()
    ray.shutdown()  # from here on, no process prints
    sys.stdout.flush()
    for line in lines:
        print(f"openrlhf-bapo: {line}", file=sys.stderr, flush=True)
    sys.exit(128 + signals[0] if signals else 1)


def _prepare_ray(args: argparse.Namespace, signals: list[int], failures: list[BaseException]) -> None:
    """Let OpenRLHF's `ray.init`, which runs after OpenRLHF's own checks, register our parts in every worker.

    From then on `signals` gets the number of each signal. A cluster that cannot run the command is refused.
    """
    import ray

    from openrlhf_bapo.openrlhf import cpu, registration
    from openrlhf_bapo.run.cluster import check_nodes, use_absolute_paths, wait_for_room

    if os.environ.get("RAY_ADDRESS"):
        use_absolute_paths(args)
    resources = {}
    if registration.runs_on_cpu():
        cpu.adapt_flags(args)
        resources = cpu.ray_resources(args)
    registration.start_ray_at_equal_priority()
    upstream = ray.init

    @functools.wraps(upstream)
    def init(*positional: Any, runtime_env: dict | None = None, **kwargs: Any) -> Any:
        runtime_env = registration.runtime_env(vars(args)["ds.param_dtype"], runtime_env)
        if not os.environ.get("RAY_ADDRESS"):
            positional = ("local",)  # otherwise Ray joins a cluster that `ray start` has started on this machine
        context = upstream(*positional, runtime_env=runtime_env, **kwargs | resources)
        # Ray has just set its own handlers.
        catch_signals(signals, failures, vars(args)["ckpt.on_interrupt"])
        check_nodes(args)
        wait_for_room(args)
        return context

    ray.init = init


if __name__ == "__main__":
    main()
