"""How a user's mistake ends a command: in one line, with exit code 2."""

import sys
from typing import NoReturn


class FlagError(ValueError):
    """A user's mistake, in one line that names the flag, its value and the allowed values.

    Functions that "refuse" something raise it.
    """


def shown(flag: str, value: object) -> str:
    """Return a flag with its value as it was typed: a switch, or a flag without a value, has none."""
    if value is None or value is True:
        return f"--{flag}"
    return " ".join([f"--{flag}", *map(str, value if isinstance(value, list | tuple) else [value])]).rstrip()


def exit_with_one_line(message: str) -> NoReturn:
    """Replace `parser.error`, which would print the usage of 200 flags before the message."""
    sys.stderr.write(f"openrlhf-bapo: {message}\n")
    sys.exit(2)
