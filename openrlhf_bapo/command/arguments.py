"""OpenRLHF's own parsing and checking of a training command, which lives in its main block, with our flags in it."""

import argparse
import runpy
import sys
from collections.abc import Callable

from openrlhf_bapo.command import checks
from openrlhf_bapo.command.flags import FlagError, add_flags, check_flags, exit_with_one_line, resolve_flags
from openrlhf_bapo.command.input_files import warn
from openrlhf_bapo.core.saved_pool import SavedStateError
from openrlhf_bapo.openrlhf.registration import register
from openrlhf_bapo.openrlhf.replay_checkpoint import find_whole_checkpoint

UPSTREAM = "openrlhf.cli.train_ppo_ray"


class _Checked(BaseException):
    """Ends OpenRLHF's main block where it would start Ray."""


def run_upstream(
    argv: list[str],
    prepare: Callable[[argparse.Namespace], None],
    start: Callable[[], None],
    depth: int = checks.MACHINE,
) -> None:
    """Run OpenRLHF's training command in this process, with our flags and our parts in it.

    Args:
        argv: OpenRLHF's flags and ours; a mistake ends the process with one line and exit code 2.
        prepare: called with the parsed arguments, flat, when we have checked them and before OpenRLHF does.
        start: called when OpenRLHF has checked them too, before it starts Ray.
        depth: of our checks, as `checks.check` has it.
    """
    check_flags(argv)
    early = checks.load_early(argv) if depth >= checks.FILES else []
    register()
    import ray

    upstream_parse_args, upstream_argv = argparse.ArgumentParser.parse_args, sys.argv
    upstream_is_initialized = ray.is_initialized

    def parse_args(parser: argparse.ArgumentParser, *args, **kwargs) -> argparse.Namespace:
        argparse.ArgumentParser.parse_args = upstream_parse_args  # for this one parser
        add_flags(parser)
        parser.error = exit_with_one_line
        parsed = upstream_parse_args(parser, *args, **kwargs)
        try:
            resolve_flags(parsed)
            checks.check(parsed, _given(parser), depth, early)
            if reason := find_whole_checkpoint(parsed):
                warn(reason)
        except (FlagError, SavedStateError) as error:
            parser.error(str(error))
        prepare(parsed)
        return parsed

    def is_initialized() -> bool:
        ray.is_initialized = upstream_is_initialized
        start()
        return upstream_is_initialized()

    argparse.ArgumentParser.parse_args, ray.is_initialized = parse_args, is_initialized
    sys.argv = [UPSTREAM, *argv]
    try:
        runpy.run_module(UPSTREAM, run_name="__main__")
    except AssertionError as error:
        if ray.is_initialized is not is_initialized:
            raise  # training's own
        exit_with_one_line(str(error))  # how OpenRLHF refuses
    finally:
        argparse.ArgumentParser.parse_args, sys.argv = upstream_parse_args, upstream_argv
        ray.is_initialized = upstream_is_initialized
        for file in early:
            file.end()


def _given(parser: argparse.ArgumentParser) -> set[str]:
    """The names of the flags on the command line: argparse fills in a default only where nothing stands yet."""
    nothing = object()
    parsed = parser.parse_args(namespace=argparse.Namespace(**{action.dest: nothing for action in parser._actions}))
    return {name for name, value in vars(parsed).items() if value is not nothing}


def parse(argv: list[str], depth: int = checks.FLAGS) -> argparse.Namespace:
    """The arguments that `argv` would train with: parsed, checked by OpenRLHF and by us, and nested. Starts nothing.

    A mistake ends the process with one line and exit code 2.

    Args:
        argv: OpenRLHF's flags and ours.
        depth: of our checks, as `checks.check` has it.
    """
    from openrlhf.utils import config

    upstream_hierarchize = config.hierarchize
    nested = []

    def hierarchize(args: argparse.Namespace) -> argparse.Namespace:
        nested.append(upstream_hierarchize(args))
        return nested[-1]

    def stop() -> None:
        raise _Checked

    config.hierarchize = hierarchize
    try:
        run_upstream(argv, prepare=lambda _: None, start=stop, depth=depth)
    except _Checked:
        return nested[-1]
    finally:
        config.hierarchize = upstream_hierarchize
    raise RuntimeError(f"{UPSTREAM} no longer asks whether Ray runs")
