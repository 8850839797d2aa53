"""The console script `openrlhf-bapo`: one command a file."""

import importlib
import sys

COMMANDS = {
    "train": "train_ppo_ray",
    "plan": "plan",
    "data": "data",
    "evaluate": "evaluate",
    "serve-rm": "serve_rm",
    "serve-math-reward": "serve_math_reward",
    "progress": "progress",
    "plot": "plot",
    "tokens": "tokens",
}


def main() -> None:
    """Run the command that the first argument names, with the arguments after it."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] not in COMMANDS:
        sys.exit(f"usage: openrlhf-bapo {{{','.join(COMMANDS)}}} ...")
    importlib.import_module(f"openrlhf_bapo.cli.{COMMANDS[arguments[0]]}").main(arguments[1:])


if __name__ == "__main__":
    main()
