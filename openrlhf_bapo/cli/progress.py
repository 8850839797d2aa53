"""Follows a training run: keeps its whole output in a file, shows one line per step and per evaluation."""

import argparse
import ast
import collections
import re
import sys
import time

# As OpenRLHF's trainers log them (trainer/ppo_trainer.py and ppo_trainer_async.py).
_STEP = re.compile(r"Global step (\d+): (\{.*\})")
_EVALUATION = re.compile(r"(?:Evaluation completed in .* global_step|Eval at step) (\d+)(?:, eval_metrics)?: (\{.*\})")
_COLUMNS = {
    "reward": "rollout/reward_mean",
    "entropy": "entropy_loss",
    "clip low": "bapo/clip_low",
    "clip high": "bapo/clip_high",
    "positive share": "bapo/positive_share",
    "grad norm": "actor_grad_norm",
    "seconds": "timing/step_total",
}
_LINES_AT_FAILURE = 40


def describe(line: str) -> str | None:
    """What a person wants to see of one line of OpenRLHF's log, or None."""
    if match := _STEP.search(line):
        metrics = ast.literal_eval(match[2].replace(": nan", ": None"))
        shown = [f"{title} {metrics[key]:.3f}" for title, key in _COLUMNS.items() if metrics.get(key) is not None]
        return f"step {match[1]:>4}  " + "  ".join(shown)
    if match := _EVALUATION.search(line):
        metrics = ast.literal_eval(match[2])
        accuracy = [f"{key.removeprefix('eval_')} {value:.3f}" for key, value in metrics.items() if "pass" in key]
        return f"evaluation at step {match[1]}: " + ", ".join(accuracy)
    return None


def main(argv: list[str]) -> None:
    """Read a run's output from standard input until it ends; `--every N` thins out the steps shown."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo progress", description=__doc__)
    parser.add_argument("--log", required=True, help="file that the whole output goes to")
    parser.add_argument("--every", type=int, default=1, help="show every N-th step")
    args = parser.parse_args(argv)

    start, last, finished_steps = time.monotonic(), collections.deque(maxlen=_LINES_AT_FAILURE), 0
    with open(args.log, "w") as log:
        for line in sys.stdin:
            log.write(line)
            log.flush()
            last.append(line)
            shown = describe(line)
            if shown is None:
                continue
            if shown.startswith("step"):
                finished_steps += 1
                if (finished_steps - 1) % args.every:
                    continue
            print(f"[{time.monotonic() - start:4.0f} s] {shown}", flush=True)
    if not finished_steps:
        print(f"no step was finished; the last lines of {args.log}:", file=sys.stderr)
        sys.stderr.writelines(last)
