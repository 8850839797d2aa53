"""The console script `openrlhf-bapo`, with one file per command."""

import importlib.util
import re
import signal
import sys
from importlib import metadata

from openrlhf_bapo.flags.mistakes import exit_with_one_line

# Module of each command, and the extra that has its packages.
COMMANDS = {
    "train": ("train_ppo_ray", "openrlhf"),
    "plan": ("plan", "openrlhf"),
    "data": ("data", "math"),
    "evaluate": ("evaluate", "openrlhf"),
    "serve-rm": ("serve_rm", "openrlhf"),
    "serve-math-reward": ("serve_math_reward", "math"),
    "progress": ("progress", None),
    "plot": ("plot", "plot"),
    "tokens": ("tokens", "plot"),
    "doctor": ("doctor", "plot"),
}


def main() -> None:
    """Run the command in the first argument with the arguments after it."""
    command, *arguments = sys.argv[1:] or [""]
    if command in ("-h", "--help"):
        print(f"usage: openrlhf-bapo {{{','.join(COMMANDS)}}} ...")
        return
    if command not in COMMANDS:
        exit_with_one_line(f"{command or 'the command is missing'}: allowed: {', '.join(COMMANDS)}, --help")
    module, extra = COMMANDS[command]
    if missing := _missing(extra):
        sys.exit(f"openrlhf-bapo {command} needs {', '.join(missing)}: pip install 'openrlhf-bapo[{extra}]'")
    try:
        importlib.import_module(f"openrlhf_bapo.cli.{module}").main(arguments)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _missing(extra: str | None) -> list[str]:
    """Return the packages of an extra that are not installed."""
    lines = [line for line in metadata.requires("openrlhf-bapo") or () if line.endswith(f'extra == "{extra}"')]
    names = [re.split(r"[^\w.-]", line)[0] for line in lines]
    return [name for name in names if importlib.util.find_spec(name.replace("-", "_")) is None]


if __name__ == "__main__":
    main()
