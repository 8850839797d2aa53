"""What a token budget does to a training step on the CPU, where the longest of a rollout's responses holds it back.

Runs `scripts/train_bapo_partial_quickstart.sh`, whose responses have a heavy tail of lengths, without a budget and with
each of `--budgets` by turns, at a learning rate that leaves the weights, and with them the lengths, as they are.
Printed are medians over all steps but a run's first six, in which the engine compiles and, under a budget, the long
responses have only begun, and its last two, in which no new ones begin.

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


def measure(budget: int, steps: int, flags: list[str]) -> list[dict[str, float]]:
    """The figures of a run's steps, of `NAMES`."""
    script = Path(__file__).parent.parent / "scripts/train_bapo_partial_quickstart.sh"
    environment = {"STEPS": str(steps), "BUDGET": str(budget), "EVAL_STEPS": "-1"}
    command = ["bash", script, "--actor.adam.lr", "1e-9", "--eval.n_samples_per_prompt", "1", *flags]
    process = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stdout + process.stderr)
    scalars = read_scalars(Path(process.stdout.splitlines()[-1]).parent / "tensorboard")
    found = {name: scalars.get(f"train/{tag}", (None, [0.0] * steps))[1] for name, tag in NAMES.items()}
    rows = zip(*(values[MEASURED] for values in found.values()), strict=True)
    return [dict(zip(found, row, strict=True)) for row in rows]


def main() -> None:
    """Run `--turns` runs of each kind by turns and print the medians; further flags go to the training command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2, help="runs of each kind (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="training steps of a run (%(default)s)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64], help="(%(default)s)")
    args, flags = parser.parse_known_args()

    found = {budget: [] for budget in (0, *args.budgets)}
    for turn in range(args.turns):
        for budget, steps in found.items():
            steps += measure(budget, args.steps, flags)
            print(f"turn {turn}, budget {budget}: {len(steps)} steps", flush=True)
    for budget, steps in found.items():
        tokens = [step["samples"] * step["length"] for step in steps]
        medians = {name: statistics.median(step[name] for step in steps) for name in ("generation", "step")}
        rate = statistics.median(number / step["step"] for number, step in zip(tokens, steps, strict=True))
        total = {name: sum(step[name] for step in steps) for name in ("step", "samples", "dropped")}
        print(
            f"budget {budget:4}: generation {medians['generation']:.2f} s, step {medians['step']:.2f} s, "
            f"{rate:.0f} response tokens trained a second (in all {sum(tokens) / total['step']:.0f}), "
            f"length {sum(tokens) / total['samples']:.1f}, {total['dropped']:.0f} groups dropped, {len(steps)} steps"
        )


if __name__ == "__main__":
    main()
