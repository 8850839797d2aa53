"""`openrlhf.cli.train_ppo_ray` with BAPO: all of its flags and ours, in the same Ray pipeline."""

import argparse
import functools
import os
import runpy
import sys

from openrlhf_bapo.adapter.flags import FlagError, add_flags, check_flags, exit_with_one_line, resolve_flags
from openrlhf_bapo.adapter.replay_checkpoint import check_saved_pool
from openrlhf_bapo.core.replay_pool import ReplayPoolError

UPSTREAM = "openrlhf.cli.train_ppo_ray"


def main(argv: list[str] | None = None) -> None:
    """Train. Flags from `argv`, or from the command line; a mistake ends with one line and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    check_flags(argv)

    from openrlhf_bapo.adapter.registration import register

    register()
    _parse_our_flags_too()
    sys.argv = [UPSTREAM, *argv]
    runpy.run_module(UPSTREAM, run_name="__main__")


def _parse_our_flags_too() -> None:
    """Join our flags to those of the parser that OpenRLHF's main block builds and parses with."""
    upstream = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, *args, **kwargs) -> argparse.Namespace:
        argparse.ArgumentParser.parse_args = upstream  # for this one parser
        add_flags(parser)
        parser.error = exit_with_one_line
        parsed = upstream(parser, *args, **kwargs)
        try:
            resolve_flags(parsed)
            check_saved_pool(parsed)
        except (FlagError, ReplayPoolError) as error:
            parser.error(str(error))
        _prepare_ray(parsed)
        return parsed

    argparse.ArgumentParser.parse_args = parse_args


def _prepare_ray(args: argparse.Namespace) -> None:
    """Let OpenRLHF's `ray.init`, which comes after its own checks, set up every worker with our registration."""
    import ray
    import torch

    from openrlhf_bapo.adapter import cpu
    from openrlhf_bapo.adapter.registration import WORKER_SETUP_HOOK

    upstream = ray.init

    @functools.wraps(upstream)
    def init(*positional, runtime_env=None, **kwargs):
        if not torch.cuda.is_available() and not os.environ.get("RAY_ADDRESS"):
            kwargs |= cpu.ray_resources(args)
        runtime_env = {**(runtime_env or {}), "worker_process_setup_hook": WORKER_SETUP_HOOK}
        return upstream(*positional, runtime_env=runtime_env, **kwargs)

    ray.init = init


if __name__ == "__main__":
    main()
