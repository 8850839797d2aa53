"""Whole training steps of the quickstart by method, on the CPU: what the search costs beside OpenRLHF's fixed clip.

The methods are run by turns through the real command, and medians are taken over all steps but the first three of every
run. Printed are seconds of the training phase, of the forward for the ratios and the search in it, and of the step, and
phase and step against ppo's.

    .venv/bin/python benchmarks/step.py                         # four micro-batches an optimizer step
    .venv/bin/python benchmarks/step.py --micro_batch_size 32   # one
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
sys.path.append(str(REPOSITORY / "tests" / "support"))
import pipeline  # noqa: E402

WARM_UP = 3
METHODS = {
    "ppo": ({"METHOD": "grpo"}, []),
    "bapo": ({"METHOD": "bapo", "PRESET": "readme"}, []),
    "gradient": ({"METHOD": "bapo_gradient"}, []),
    "micro_batch": ({"METHOD": "bapo", "PRESET": "readme"}, ["--bapo.scope", "micro_batch"]),
    "steady": ({"METHOD": "bapo", "PRESET": "steady"}, []),
    "replay": ({"METHOD": "bapo", "PRESET": "readme"}, ["--replay.ratio", "1"]),
}

SIZES = {"TASK": "chain_sum", "MAX_NEW_TOKENS": "8", "EVAL_STEPS": "1000"}


def main() -> None:
    """Run every method `--turns` times, by turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["ppo", "bapo", "steady"])
    parser.add_argument("--turns", type=int, default=3, help="runs of each method (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="training steps of a run (%(default)s)")
    parser.add_argument("--micro_batch_size", type=int, default=8, help="of optimizer steps of 32 (%(default)s)")
    args = parser.parse_args()

    found = {method: [] for method in args.methods}
    with tempfile.TemporaryDirectory() as runs:
        for turn in range(args.turns):
            # In another order every turn, so that none is always the first.
            for method in args.methods[turn % len(args.methods) :] + args.methods[: turn % len(args.methods)]:
                environment, flags = METHODS[method]
                flags = [*flags, "--train.micro_batch_size", str(args.micro_batch_size)]
                subprocess.run(
                    ["bash", "scripts/train_bapo_quickstart.sh", *flags],
                    cwd=REPOSITORY,
                    env=os.environ | environment | SIZES | {"RUNS": runs, "STEPS": str(args.steps)},
                    stdout=subprocess.DEVNULL,
                    check=True,
                )
                (log,) = Path(runs).glob("*/train.log")
                found[method] += pipeline.steps(log.read_text())[WARM_UP:]
                log.rename(Path(runs, f"{method}-{turn}.log"))
                print(f"turn {turn}, {method}: {len(found[method])} steps", flush=True)

    def median(method: str, name: str) -> float:
        return statistics.median(step.get(name, 0.0) for step in found[method])

    print("| method | ppo_train (s) | ratio forward | search | step (s) | ppo_train / ppo's | step / ppo's | steps |")
    print("|---|---|---|---|---|---|---|---|")
    for method, steps in found.items():
        train, step = median(method, "timing/ppo_train"), median(method, "timing/step_total")
        ratios = "- | -"
        search = median(method, "timing/bapo_search")
        if "ppo" in found:
            ratios = (
                f"{train / median('ppo', 'timing/ppo_train'):.3f} | {step / median('ppo', 'timing/step_total'):.3f}"
            )
        forward = median(method, "timing/bapo_ratio_forward")
        print(f"| {method} | {train:.3f} | {forward:.3f} | {search:.3f} | {step:.3f} | {ratios} | {len(steps)} |")


if __name__ == "__main__":
    main()
