"""OpenRLHF's own parsing and checking of a training command, which lives in its main block, with our flags in it."""

import argparse
import runpy
import sys
from collections.abc import Callable

from openrlhf_bapo.adapter.flags import FlagError, add_flags, check_flags, exit_with_one_line, resolve_flags
from openrlhf_bapo.adapter.registration import register
from openrlhf_bapo.adapter.replay_checkpoint import check_saved_pools
from openrlhf_bapo.core.replay_pool import ReplayPoolError

UPSTREAM = "openrlhf.cli.train_ppo_ray"


class _Checked(BaseException):
    """Ends OpenRLHF's main block where it would start Ray."""


def run_upstream(argv: list[str], prepare: Callable[[argparse.Namespace], None]) -> None:
    """Run OpenRLHF's training command in this process, with our flags and our parts in it.

    Args:
        argv: OpenRLHF's flags and ours; a mistake ends the process with one line and exit code 2.
        prepare: called with the parsed arguments, flat, before OpenRLHF checks them.
    """
    check_flags(argv)
    register()
    upstream_parse_args, upstream_argv = argparse.ArgumentParser.parse_args, sys.argv

    def parse_args(parser: argparse.ArgumentParser, *args, **kwargs) -> argparse.Namespace:
        argparse.ArgumentParser.parse_args = upstream_parse_args  # for this one parser
        add_flags(parser)
        parser.error = exit_with_one_line
        parsed = upstream_parse_args(parser, *args, **kwargs)
        try:
            resolve_flags(parsed)
            check_saved_pools(parsed)
        except (FlagError, ReplayPoolError) as error:
            parser.error(str(error))
        prepare(parsed)
        return parsed

    argparse.ArgumentParser.parse_args = parse_args
    sys.argv = [UPSTREAM, *argv]
    try:
        runpy.run_module(UPSTREAM, run_name="__main__")
    finally:
        argparse.ArgumentParser.parse_args, sys.argv = upstream_parse_args, upstream_argv


def parse(argv: list[str]) -> argparse.Namespace:
    """The arguments that `argv` would train with: parsed, checked by OpenRLHF and by us, and nested. Starts nothing.

    A mistake ends the process with one line and exit code 2.
    """
    import ray
    from openrlhf.utils import config

    upstream_hierarchize, upstream_is_initialized = config.hierarchize, ray.is_initialized
    nested = []

    def hierarchize(args: argparse.Namespace) -> argparse.Namespace:
        nested.append(upstream_hierarchize(args))
        return nested[-1]

    def stop() -> bool:
        raise _Checked

    config.hierarchize, ray.is_initialized = hierarchize, stop
    try:
        run_upstream(argv, prepare=lambda _: None)
    except _Checked:
        return nested[-1]
    except AssertionError as error:  # how OpenRLHF refuses
        exit_with_one_line(str(error))
    finally:
        config.hierarchize, ray.is_initialized = upstream_hierarchize, upstream_is_initialized
    raise RuntimeError(f"{UPSTREAM} no longer asks whether Ray runs")
