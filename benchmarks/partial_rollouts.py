"""The effect of a token budget on a training step on the CPU, where the longest response holds a rollout back.

Runs `scripts/train_bapo_partial_quickstart.sh`, whose responses have a heavy tail of lengths, without a budget and with
each of `--budgets` by turns, at a learning rate that leaves the weights, and with them the lengths, as they are.
Printed are medians over all steps but a run's first six, in which the engine compiles and, under a budget, the long
responses have only begun, and its last two, in which no new ones begin; and the tokens a second of whole runs.

    .venv/bin/python benchmarks/partial_rollouts.py
"""

import argparse
import os
import statistics
import subprocess
from pathlib import Path

from openrlhf_bapo.cli.plot import read_scalars

MEASURED = slice(6, -2)
NAMES = {
    "generation": "timing/generation",
    "step": "timing/step_total",
    "length": "rollout/response_length_mean",
    "samples": "rollout/num_samples",
    "dropped": "partial/dropped",
}


def train(budget: int, steps: int, flags: list[str]) -> Path:
    """The folder of a run."""
    script = Path(__file__).parent.parent / "scripts/train_bapo_partial_quickstart.sh"
    environment = {"STEPS": str(steps), "BUDGET": str(budget), "EVAL_STEPS": "-1"}
    command = ["bash", script, "--actor.adam.lr", "1e-9", "--eval.n_samples_per_prompt", "1", *flags]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stdout + process.stderr)
    return Path(process.stdout.splitlines()[-1]).parent


def report(budget: int, folders: list[Path]) -> str:
    """Return one line with the figures that the runs in `folders` logged."""
    runs = []
    for folder in folders:
        scalars = read_scalars(folder / "tensorboard")
        steps = len(scalars["train/timing/step_total"][1])
        found = {name: scalars.get(f"train/{tag}", (None, [0.0] * steps))[1] for name, tag in NAMES.items()}
        runs.append([dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)])

    def tokens(step: dict[str, float]) -> float:
        return step["samples"] * step["length"]

    measured, everything = ([s for run in runs for s in run[part]] for part in (MEASURED, slice(None)))
    medians = {name: statistics.median(step[name] for step in measured) for name in ("generation", "step")}
    rate = statistics.median(tokens(step) / step["step"] for step in measured)
    overall = sum(map(tokens, everything)) / sum(step["step"] for step in everything)
    return (
        f"budget {budget:4}: generation {medians['generation']:.2f} s, step {medians['step']:.2f} s, "
        f"{rate:.0f} response tokens trained a second (medians of {len(measured)} steps); all {len(everything)} steps: "
        f"{overall:.0f} tokens a second, {sum(step['dropped'] for step in everything):.0f} groups dropped"
    )


def main() -> None:
    """Run `--turns` runs of each kind by turns and print the medians; further flags go to the training command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=18, help="training steps of a run (%(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64], help="(%(default)s)")
    args, flags = parser.parse_known_args()

    folders = {budget: [] for budget in (0, *args.budgets)}
    for _ in range(args.turns):
        for budget in folders:
            folders[budget].append(train(budget, args.steps, flags))
            print(report(budget, folders[budget]), flush=True)


if __name__ == "__main__":
    main()
