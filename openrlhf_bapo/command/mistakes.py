"""How a user's mistake ends a command: in one line, with exit code 2."""

import sys
from typing import NoReturn


class FlagError(ValueError):
    """A user's mistake, in one line that names the flag, its value and the allowed values."""


def exit_with_one_line(message: str) -> NoReturn:
    """Replace `parser.error`, which would print the usage of 200 flags before the message."""
    sys.stderr.write(f"openrlhf-bapo: {message}\n")
    sys.exit(2)
