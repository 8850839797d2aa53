"""Follows a training run: writes its whole output to a file, and shows one line per step and per evaluation.

During a long step, one line per minute shows its progress.
"""

import argparse
import collections
import io
import math
import re
import signal
import sys
import time

from openrlhf_bapo.flags.mistakes import exit_with_one_line

# As OpenRLHF's trainers log them (trainer/ppo_trainer.py and ppo_trainer_async.py).
_STEP = re.compile(r"Global step (\d+): (\{.*\})")
_EVALUATION = re.compile(r"(?:Evaluation completed in .* global_step|Eval at step) (\d+)(?:, eval_metrics)?: (\{.*\})")
_METRIC = re.compile(r"""(?:'([^']+)'|"([^"]+)"): (-?(?:inf|nan|\d+(?:\.\d*)?(?:e[-+]?\d+)?))[,}]""")
_BAR = re.compile(r"(Generate samples|Train epoch \[\d+/\d+\]): +\d+%\|[^|]*\| (\d+/\d+) \[")  # tqdm's
_ACTOR = re.compile(r"(?:\x1b\[\d+m)?(\(\w+ pid=\d+[^)]*\))(?:\x1b\[0m)? ")  # Ray's, before a line of another process
_CUT = re.compile(r"(?:Global step \d+|global_step \d+, eval_metrics|Eval at step \d+): \{[^}]*$")
_BARS = {"Generate samples": "prompts", "Train epoch": "micro-batches of a rank"}
_QUIET_SECONDS = 60
"""Seconds without a line, after which the progress of the step is shown."""

_COLUMNS = {
    "reward": "rollout/reward_mean",
    "entropy": "entropy_loss",
    "clip low": "bapo/clip_low",
    "clip high": "bapo/clip_high",
    "positive share": "bapo/positive_share",
    "grad norm": "actor_grad_norm",
    "seconds": "timing/step_total",
}
# `openrlhf-bapo train` prints these at the start of a line. Ray puts a name before the lines of other processes.
_OURS, _COMPLETE = "openrlhf-bapo: ", "openrlhf-bapo: the run is complete"
_LINES_AT_FAILURE = 10
SILENT = "the command ended here without a message, so it was probably killed"
"""What is said of a command that did not say why it ended."""


class Pieces:
    """Joins lines of metrics that Ray cut in two. Ray prints the unfinished line of an actor as a separate line."""

    def __init__(self) -> None:
        self._cut: dict[str, str] = {}  # by actor

    def join(self, line: str) -> str:
        """Return a line of a run's output, joined to the same actor's last line if Ray has cut that line in two."""
        if not (actor := _ACTOR.match(line)):
            return line
        if before := self._cut.pop(actor[1], ""):
            line = before.rstrip("\n") + line[actor.end() :]
        if _CUT.search(line):
            self._cut[actor[1]] = line
        return line


def describe(line: str) -> str | None:
    """Shorten one line of a run's output for a person, or return None if it need not be shown."""
    actor = _ACTOR.match(line)
    if line.startswith(_OURS, actor.end() if actor else 0):
        return line[actor.end() if actor else 0 :].rstrip("\n")
    if match := _STEP.search(line):
        metrics = {key: value for key, value in _metrics(match[2]).items() if not math.isnan(value)}
        shown = [f"{title} {metrics[key]:.3f}" for title, key in _COLUMNS.items() if key in metrics]
        return f"step {match[1]:>4}  " + "  ".join(shown)
    if evaluation := accuracy(line):
        step, by_name = evaluation
        return f"evaluation at step {step}: " + ", ".join(f"{name} {value:.3f}" for name, value in by_name.items())
    return None


def describe_bar(line: str) -> str | None:
    """Describe the progress of a step from the last progress bar in a line; None if it has no bar."""
    if not (bars := _BAR.findall(line)):
        return None
    name, done = bars[-1]
    what = next(what for bar, what in _BARS.items() if name.startswith(bar))
    return f"  {name[0].lower()}{name[1:]}: {done.replace('/', ' of ')} {what}"


def accuracy(line: str) -> tuple[int, dict[str, float]] | None:
    """Return (global step, pass rates by name) from a line that reports an evaluation, else None."""
    if match := _EVALUATION.search(line):
        metrics = _metrics(match[2])
        return int(match[1]), {k.removeprefix("eval_"): v for k, v in metrics.items() if re.search(r"_pass\d+$", k)}
    return None


def _metrics(text: str) -> dict[str, float]:
    """Return the numbers of a printed dict, inf and nan among them."""
    return {name or quoted: float(value) for name, quoted, value in _METRIC.findall(text)}


def main(argv: list[str]) -> None:
    """Read a run's output from standard input until it ends."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo progress", description=__doc__)
    parser.error = exit_with_one_line
    parser.add_argument("--log", required=True, help="file for the whole output")
    parser.add_argument("--every", type=int, default=1, help="show every N-th step")
    args = parser.parse_args(argv)
    if args.every < 1:
        parser.error(f"--every {args.every}: allowed: 1 or more")
    try:
        log = open(args.log, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        parser.error(f"--log {args.log}: cannot be written ({error.strerror}); allowed: a file's path")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the command decides when the output ends
    start = shown_at = time.monotonic()
    last: collections.deque[str] = collections.deque(maxlen=_LINES_AT_FAILURE)
    evaluations: list[tuple[int, dict[str, float]]] = []
    finished_steps, is_complete, pieces = 0, False, Pieces()
    with log:
        for line in io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace"):
            log.write(line)
            log.flush()
            last.append(line)
            line = pieces.join(line)
            is_complete |= line.startswith(_COMPLETE)
            shown = describe(line)
            if shown is None and time.monotonic() - shown_at >= _QUIET_SECONDS:
                shown = describe_bar(line)
            if shown is None:
                continue
            if evaluation := accuracy(line):
                evaluations.append(evaluation)
            if shown.startswith("step"):
                finished_steps += 1
                if (finished_steps - 1) % args.every:
                    continue
            shown_at = time.monotonic()
            print(f"[{shown_at - start:4.0f} s] {shown}", flush=True)
    if is_complete:
        _print_improvement(evaluations)
    else:
        if not any(line.startswith(_OURS) for line in last):
            sys.stderr.writelines(last)
            print(SILENT, file=sys.stderr)
        print(f"openrlhf-bapo: the whole output is in {args.log}", file=sys.stderr)


def _print_improvement(evaluations: list[tuple[int, dict[str, float]]]) -> None:
    if len(evaluations) > 1:
        (first, before), (last_step, after) = evaluations[0], evaluations[-1]
        for name in before:
            if name.endswith("_pass1") and name in after:
                print(f"held-out {name}: {before[name]:.3f} at step {first}, {after[name]:.3f} at step {last_step}")
