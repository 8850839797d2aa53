"""From the quickstart's command to its first trained step: what the start takes, by phase.

Runs the training command `--turns` times over a policy that is made first, and prints the median, quickest and slowest
second at which each phase was over.

    .venv/bin/python benchmarks/startup.py
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent

# The line of the log that ends each phase.
PHASES = {
    "flags and files checked, OpenRLHF imported": r"on the CPU --vllm.enforce_eager",
    "Ray started": r"Started a local Ray instance",
    "rollout actor has imported OpenRLHF and vLLM": r"RolloutRayActor.*Loading custom `reward_func",
    "policy loaded into the trainer": r"PolicyModelActor.*Actor\(",
    "engine's process has imported vLLM": r"EngineCore.*Initializing a V1 LLM engine",
    "engine ready": r"EngineCore.*init engine .* took",
    "first training step": r"Global step 1: ",
}


def start(runs: Path) -> dict[str, float]:
    """Seconds from the command to the end of each phase, in one run."""
    settings = {"RUNS": str(runs), "STEPS": "1", "EVAL_STEPS": "1000"}
    began, ends = time.monotonic(), {}
    known = set(runs.glob("*/train.log"))
    command = subprocess.Popen(
        ["bash", "scripts/train_bapo_quickstart.sh"],
        cwd=REPOSITORY,
        env=os.environ | settings,
        stdout=subprocess.DEVNULL,
    )
    while command.poll() is None:
        time.sleep(0.05)
        for log in set(runs.glob("*/train.log")) - known:
            text = log.read_text()
            for phase, said in PHASES.items():
                if phase not in ends and re.search(said, text):
                    ends[phase] = time.monotonic() - began
    if command.returncode or len(ends) < len(PHASES):
        raise SystemExit(f"the command ended with {command.returncode} after {list(ends)}; see {runs}")
    return ends


def main() -> None:
    """Start `--turns` times and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="(%(default)s)")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as runs:
        for turn in range(-1, args.turns):  # the first makes the policy and warms the disk's cache
            ends = start(Path(runs))
            if turn >= 0:
                found.append(ends)
                print(f"turn {turn}: {ends['first training step']:.1f} s", flush=True)
    print("| over after (s) | median | quickest | slowest |\n|---|---|---|---|")
    for phase in PHASES:
        seconds = [ends[phase] for ends in found]
        print(f"| {phase} | {statistics.median(seconds):.1f} | {min(seconds):.1f} | {max(seconds):.1f} |")


if __name__ == "__main__":
    main()
