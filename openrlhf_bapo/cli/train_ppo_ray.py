"""`openrlhf.cli.train_ppo_ray` with BAPO: all of its flags and ours, in the same Ray pipeline."""

import argparse
import functools
import os
import signal
import sys
import traceback
from typing import NoReturn

from openrlhf_bapo.command.arguments import run_upstream
from openrlhf_bapo.command.interrupts import catch_signals, find_dead_engine, leave_signals, watch_engines
from openrlhf_bapo.command.plan import warn_of_small_disks
from openrlhf_bapo.openrlhf.replay_checkpoint import use_checkpoint


def main(argv: list[str] | None = None) -> None:
    """Train. Flags from `argv`, or from the command line; a mistake ends with one line and exit code 2.

    Whatever else ends it, the last lines on stderr say why and what is saved, and the exit code is 1; 143 after SIGTERM
    and 130 after Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command starts with none
    values, signals, failures, engines, started = {}, [], [], [], []
    watch_engines(engines, failures)

    def prepare(args: argparse.Namespace) -> None:
        warn_of_small_disks(args)
        use_checkpoint(args)
        _prepare_ray(args, signals)
        values.update(vars(args))

    try:
        run_upstream(sys.argv[1:] if argv is None else argv, prepare, start=lambda: started.append(True))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not started:
            sys.exit(128 + signal.SIGINT)
        if not started or isinstance(error, SystemExit):
            raise
        if not failures and isinstance(error, RuntimeError):  # as that of a connection that broke
            error = find_dead_engine(engines) or error
        _end(failures[0] if failures else error, values, signals)
    print(f"openrlhf-bapo: the run is complete; its model is in {values['ckpt.output_dir']}", flush=True)


def _end(error: BaseException, values: dict, signals: list[int]) -> NoReturn:
    """Say what has ended the run, after all that its processes say."""
    import ray

    from openrlhf_bapo.command.failures import describe_failure

    leave_signals()
    traceback.print_exception(error)
    lines = describe_failure(error, values, signals)
    ray.shutdown()  # nobody prints any more
    sys.stdout.flush()
    for line in lines:
        print(f"openrlhf-bapo: {line}", file=sys.stderr, flush=True)
    sys.exit(128 + signals[0] if signals else 1)


def _prepare_ray(args: argparse.Namespace, signals: list[int]) -> None:
    """Let OpenRLHF's `ray.init`, which comes after its own checks, set up every worker with our registration.

    From then on `signals` gets the numbers of those that come.
    """
    import ray
    import torch

    from openrlhf_bapo.openrlhf import cpu
    from openrlhf_bapo.openrlhf.registration import WORKER_SETUP_HOOK

    resources = {}
    if not torch.cuda.is_available() and not os.environ.get("RAY_ADDRESS"):
        cpu.adapt_flags(args)
        resources = cpu.ray_resources(args)
    upstream = ray.init

    @functools.wraps(upstream)
    def init(*positional, runtime_env=None, **kwargs):
        runtime_env = {**(runtime_env or {}), "worker_process_setup_hook": WORKER_SETUP_HOOK}
        context = upstream(*positional, runtime_env=runtime_env, **kwargs | resources)
        catch_signals(signals, vars(args)["ckpt.on_interrupt"])  # Ray has just set handlers of its own
        return context

    ray.init = init


if __name__ == "__main__":
    main()
