"""Tables of commands that change one that passes, so that each can only fail because of its change."""

import re
import shlex
from pathlib import Path

import pipeline


def rows(table: str) -> list[tuple[str, str]]:
    """Return (flags, what is said of them) of each row.

    A row is "FLAGS => PART ... PART"; an indented line continues it. What starts with a colon is said of the last flag.
    """
    found = []
    for row in re.sub(r"\n +", " ", table.strip()).splitlines():
        flags, said = row.split(" => ")
        found.append((flags, flags[flags.rindex("--") :].replace("'", "") + said if said.startswith(":") else said))
    return found


def argv(directory: Path, flags: str = "") -> list[str]:
    """Return the flags of a short run in {d} and `flags`, which win; ~FLAG leaves one of the short run's out."""
    words = shlex.split(flags.replace("{d}", str(directory)))
    left_out = {word[1:]: None for word in words if word.startswith("~")}
    return [*pipeline.flags(directory, **left_out), *(word for word in words if not word.startswith("~"))]


def says(line: str, said: str) -> bool:
    """Return whether a line has every part of a row's second column."""
    return all(part in line for part in said.split(" ... "))
