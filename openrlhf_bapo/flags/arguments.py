"""Parses and checks a training command with OpenRLHF's own main block and our flags in it."""

import argparse
import contextlib
import runpy
import sys
from collections.abc import Callable

from openrlhf_bapo.flags import checks
from openrlhf_bapo.flags.input_files import warn
from openrlhf_bapo.flags.mistakes import FlagError, exit_with_one_line
from openrlhf_bapo.flags.train_flags import add_flags, check_flags, resolve_flags
from openrlhf_bapo.offpolicy.saved_pool import SavedStateError
from openrlhf_bapo.openrlhf.registration import register, runs_on_cpu
from openrlhf_bapo.openrlhf.replay_checkpoint import find_whole_checkpoint

UPSTREAM = "openrlhf.cli.train_ppo_ray"


class _Checked(BaseException):
    """Ends OpenRLHF's main block before it starts Ray."""


def run_upstream(
    argv: list[str],
    prepare: Callable[[argparse.Namespace], None],
    start: Callable[[], None],
    depth: int = checks.MACHINE,
) -> None:
    """Run OpenRLHF's training command in this process, with our flags and our parts in it.

    Args:
        argv: OpenRLHF's flags and ours; a mistake ends the process with one line and exit code 2.
        prepare: called with the parsed arguments, flat, after our checks and before OpenRLHF's.
        start: called after OpenRLHF's checks, before it starts Ray.
        depth: how far our checks go, as in `checks.check`.
    """
    ours, file = check_flags(argv), contextlib.ExitStack()
    register()
    import ray

    upstream_parse_args, upstream_argv = argparse.ArgumentParser.parse_args, sys.argv
    upstream_is_initialized = ray.is_initialized

    def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
        argparse.ArgumentParser.parse_args = upstream_parse_args  # only OpenRLHF's own parser gets our flags
        add_flags(parser, argv)
        parser.error = exit_with_one_line
        parsed, given = _parse(parser)
        if depth == checks.MACHINE and runs_on_cpu() and "ds.param_dtype" not in given:
            vars(parsed)["ds.param_dtype"] = "fp32"  # many CPUs multiply bf16 matrices in scalar code
        try:
            resolve_flags(parsed, given)
            checks.check(parsed, given, depth)
            file.close()
            if reason := find_whole_checkpoint(parsed):
                warn(reason)
            if depth == checks.MACHINE:
                checks.check_saved_type(parsed)
        except (FlagError, SavedStateError) as error:
            parser.error(str(error))
        prepare(parsed)
        return parsed

    def is_initialized() -> bool:
        ray.is_initialized = upstream_is_initialized
        start()
        return upstream_is_initialized()

    # OpenRLHF's main block calls parse_args without arguments.
    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[assignment]
    ray.is_initialized = is_initialized
    sys.argv = [UPSTREAM, *argv]
    try:
        with file:
            if depth >= checks.FILES:
                _start_loading(file, ours)
            runpy.run_module(UPSTREAM, run_name="__main__")
    except AssertionError as error:
        if ray.is_initialized is not is_initialized:
            raise  # an error of the training itself
        exit_with_one_line(str(error))  # OpenRLHF refuses flags by assertions
    finally:
        argparse.ArgumentParser.parse_args, sys.argv = upstream_parse_args, upstream_argv
        ray.is_initialized = upstream_is_initialized


def _start_loading(file: contextlib.ExitStack, ours: argparse.Namespace) -> None:
    """Load the user's Python file beside OpenRLHF's imports, which take as long, until `file` is closed."""
    try:
        file.enter_context(checks.loading_given(vars(ours)))
    except FlagError as error:
        exit_with_one_line(str(error))


def _parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, set[str]]:
    """Parse the command line; return the arguments and the names of those that were given.

    argparse sets a default only where the namespace has no value yet. So a mark stays where a flag is not given.
    """
    mark = object()
    actions = [action for action in parser._actions if action.default is not argparse.SUPPRESS]
    parsed = parser.parse_args(namespace=argparse.Namespace(**{action.dest: mark for action in actions}))
    given = {name for name, value in vars(parsed).items() if value is not mark}
    for action in actions:
        if getattr(parsed, action.dest) is mark:
            setattr(parsed, action.dest, action.default)
    return parsed, given


def parse(argv: list[str], depth: int = checks.FLAGS) -> argparse.Namespace:
    """Parse and check the arguments that `argv` would train with, without starting anything.

    A mistake ends the process with one line and exit code 2. `depth` is as in `checks.check`.

    Returns:
        The arguments as OpenRLHF nests them.
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
