"""Says what is wrong with runs, from their TensorBoard logs: since which step, by which figure, and what to change."""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from openrlhf_bapo.cli.plot import Scalars, read_newest, read_scalars
from openrlhf_bapo.flags.mistakes import exit_with_one_line
from openrlhf_bapo.health.doctor import CHECKS, Finding, diagnose

METRICS = {check.metric for check in CHECKS}


def describe(finding: Finding) -> str:
    """Format a finding as two lines."""
    kind = "wrong" if finding.is_wrong else "watch"
    return f"{kind}: {finding.text} (`{finding.metric}`, since step {finding.since})\n       {finding.remedy}"


def _read_checked(run: Path, is_known: bool) -> Scalars:
    """Read a run's scalars by the names in `METRICS`; raise FileNotFoundError if it has none of these."""
    scalars = read_scalars(run) if is_known else read_newest(run, "diagnosed")
    scalars = {tag.removeprefix("train/"): values for tag, values in scalars.items()}
    if not METRICS & scalars.keys():
        shown = ", ".join(sorted(scalars)[:3])
        raise FileNotFoundError(f"{run}: its logs have no metric that is checked (they have {shown}, ...)")
    return scalars


def _changes(before: Iterable[Finding], now: Iterable[Finding]) -> list[str]:
    """Return lines for findings that came and went. A finding is the same as long as its metric and kind are."""
    old, new = ({(finding.metric, finding.is_wrong): finding for finding in found} for found in (before, now))
    lines = [describe(new[key]) for key in new if key not in old]
    return lines + [f"gone: `{metric}`" for metric, is_wrong in old if (metric, is_wrong) not in new]


def main(argv: list[str]) -> None:
    """Diagnose the runs. Exit code 1: something is wrong; 2: a folder has no logs."""
    parser = argparse.ArgumentParser(prog="openrlhf-bapo doctor", description=__doc__, allow_abbrev=False)
    parser.error = exit_with_one_line
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder with TensorBoard logs, of any depth")
    parser.add_argument("--json", action="store_true", help="print one JSON object: the findings by folder")
    parser.add_argument(
        "--watch", type=float, metavar="SECONDS", help="check again every SECONDS; print what appears or disappears"
    )
    args = parser.parse_args(argv)
    if args.watch is not None and not args.watch > 0:
        parser.error(f"--watch {args.watch:g}: allowed: above 0")
    if args.watch and args.json:
        parser.error("--watch and --json cannot be combined")

    found: dict[Path, list[Finding]] = {}
    num_steps: dict[Path, int] = {}
    while True:
        for run in args.runs:
            try:
                scalars = _read_checked(run, run in found)
            except FileNotFoundError as error:
                if args.watch is None:
                    parser.error(f"{error}; allowed: a folder with a training's events.out.tfevents files")
                continue  # a run that has not made its first step
            now = diagnose(scalars)
            if args.watch is not None:
                for line in _changes(found.get(run, []), now):
                    print(f"[{time.strftime('%H:%M:%S')}] {run}: {line}", flush=True)
            found[run], num_steps[run] = now, max(len(scalars[name][0]) for name in METRICS & scalars.keys())
        if args.watch is None:
            break
        time.sleep(args.watch)
    if args.json:
        print(json.dumps({str(run): [finding._asdict() for finding in now] for run, now in found.items()}, indent=1))
    else:
        for run, now in found.items():
            few = f" in {num_steps[run]} logged steps, of which some checks need 10" * (num_steps[run] < 10)
            print(f"{run}: nothing found{few}" if not now else f"{run}:")
            print("".join(f"  {describe(finding)}\n" for finding in now), end="")
    sys.exit(any(finding.is_wrong for now in found.values() for finding in now))
