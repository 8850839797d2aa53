"""Checks a GPU node in stages and writes a page: what is right, what is wrong, and what did not run.

See scripts/verify_gpu.sh. Each stage is a process with a time limit. It writes each finding at once, so a stage that
fails or hangs costs only itself. Without a GPU the same stages run with tiny sizes.

The folder --out gets report.md, findings.jsonl (with the figures), and a log per stage and per run.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from openrlhf_bapo.flags.mistakes import exit_with_one_line

REPOSITORY = Path(__file__).parents[1]
RIGHT, WRONG, NOT_RUN = "right", "wrong", "not run"
LEAST_SECONDS = 30
"""A stage does not start if --minutes leaves it less."""


@dataclass(frozen=True)
class Stage:
    """A part of the check."""

    text: str
    seconds: int
    """The stage is ended after this time. On a CPU it has ten times as much."""

    is_timed: bool = False
    """Whether its figures are times, so that it must run alone."""

    fallback: dict[str, str] = field(default_factory=dict)
    """Environment with which the stage runs a second time if it fails, and all later stages if it then succeeds."""


STAGES = {
    "versions": Stage("the packages' versions, a matrix product on each GPU", 60),
    "rules": Stage(
        "loss and gradient of each clip rule against float64 on the CPU; GPU tests; speed of the search", 180, True
    ),
    "adam": Stage("DeepSpeed compiles its optimizer, once per machine", 240),
    "engine": Stage(
        "log-probs of a vLLM engine against the model's in transformers, bf16 and fp32",
        180,
        fallback={"VLLM_USE_V2_MODEL_RUNNER": "0"},  # vLLM's older code, with fewer Triton kernels
    ),
    "ppo": Stage(
        "the quickstart's task with --policy_loss ppo: colocated, both sides sleep, weights over CUDA IPC", 240
    ),
    "shape_ppo": Stage("a model of real shape with ppo: seconds and memory of each phase, against the plan", 240, True),
    "shape_bapo": Stage("the same with BAPO's search, preset paper", 240, True),
    "shape_steady": Stage("the same with steady bounds", 240, True),
    "paper": Stage("the quickstart's task with BAPO's search: held-out accuracy", 300),
    "resume": Stage("a checkpoint, and a run that resumes it", 300),
    "replay": Stage("the quickstart's task with replay", 240),
    "budget": Stage("the quickstart's task under a token budget", 240),
    "steady": Stage("the quickstart's task with steady bounds", 240),
    "trl": Stage("TRL's trainer with BAPO, a few steps", 180),
}
"""In the order in which they run: what the next stages need comes first, then what is not known yet."""


@dataclass
class Finding:
    """One line of the page."""

    stage: str
    status: str
    what: str
    text: str
    figures: dict = field(default_factory=dict)


class Page:
    """The findings in a folder, and the page of all of them. Processes of several stages may write to it."""

    def __init__(self, folder: Path, stage: str = "") -> None:
        self.folder, self._stage = folder, stage
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, status: str, what: str, text: str, **figures: object) -> None:
        """Note a finding, print it, and write the page again."""
        finding = Finding(self._stage, status, what, text, figures)
        print(f"{status:7}  {what}: {text}", flush=True)
        with open(self.folder / "findings.jsonl", "a") as file:
            file.write(json.dumps(asdict(finding)) + "\n")
        self.write()

    def findings(self) -> list[Finding]:
        """Return all findings so far."""
        file = self.folder / "findings.jsonl"
        return [Finding(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []

    def write(self) -> None:
        """Write report.md."""
        lines = [f"# Check of {platform.node()}, {time.strftime('%Y-%m-%d %H:%M')}"]
        for status in (WRONG, RIGHT, NOT_RUN):
            chosen = [f"- {one.what}: {one.text}" for one in self.findings() if one.status == status]
            lines += ["", f"## {status.capitalize()} ({len(chosen)})", "", *(chosen or ["Nothing."])]
        aside = self.folder / f"report.{os.getpid()}"
        aside.write_text("\n".join(lines) + "\n")
        aside.replace(self.folder / "report.md")


def end(process: subprocess.Popen) -> None:
    """End a process and all that descend from it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return lines[-1].strip()[:300] if lines else "it printed nothing"


class Runner:
    """Runs stages, each as a process of this file."""

    def __init__(self, page: Page, options: list[str], deadline: float, slowdown: int) -> None:
        self._page, self._options, self._deadline, self._slowdown = page, options, deadline, slowdown
        self._running: set[subprocess.Popen] = set()
        self._variables: dict[str, str] = {}  # of the fallbacks that helped

    def run(self, name: str) -> None:
        """Run a stage, and once more with its fallback if it fails."""
        fallback = STAGES[name].fallback
        if self._run(name, f"{name}.log", self._variables) or not fallback:
            return
        if self._run(name, f"{name}-again.log", self._variables | fallback):
            self._variables |= fallback
            variables = ", ".join(f"{variable}={value}" for variable, value in fallback.items())
            self._page.add(RIGHT, f"{name}, fallback", f"succeeds with {variables}, which the later stages keep")

    def _run(self, name: str, log_name: str, variables: dict[str, str]) -> bool:
        """Run a stage until it ends, or its time, or that of --minutes. Return False if it failed."""
        stage, log = STAGES[name], self._page.folder / log_name
        limit = min(stage.seconds * self._slowdown, self._deadline - time.monotonic())
        if limit < LEAST_SECONDS:
            self._page.add(NOT_RUN, name, f"{stage.text}; --minutes left {max(limit, 0):.0f} s for it")
            return True
        command = [sys.executable, __file__, "--stage", name, "--out", str(self._page.folder), *self._options]
        start = time.monotonic()
        with open(log, "w") as file:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=os.environ | variables, stderr=file, stdin=subprocess.DEVNULL
            )
        self._running.add(process)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            end(process)
            text = (
                f"ended after its {limit:.0f} s; the last lines are in {os.path.relpath(self._page.folder)}/{name}*.log"
            )
            self._page.add(WRONG, name, f"{text}: {last_line(log)}")
            return False
        finally:
            self._running.discard(process)
        seconds = time.monotonic() - start
        if code:
            self._page.add(
                WRONG, name, f"exit code {code}: {last_line(log)} ({os.path.relpath(log)} has the whole output)"
            )
        else:
            self._page.add(RIGHT, f"{name}, seconds", f"{seconds:.0f}", seconds=seconds)
        return not code

    def end(self) -> None:
        """End the stages that run."""
        for process in [*self._running]:
            end(process)


def main() -> None:
    """Check, write the page, and exit with code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = exit_with_one_line
    listed = "".join(f"\n  {name:12} {stage.seconds:4} s  {stage.text}" for name, stage in STAGES.items())
    parser.epilog = f"stages, with their time limits:{listed}"
    parser.add_argument("--stages", help="comma-separated (default: all)", default=",".join(STAGES))
    parser.add_argument("--minutes", type=float, default=60, help="for all of it (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="stages without timings at a time (default: %(default)s)")
    parser.add_argument(
        "--model", help="folder or hub name for the stages shape_* (default: random weights in --shape)"
    )
    parser.add_argument("--shape", choices=["0.5B", "1.5B"], default="0.5B", help="of Qwen2.5 (default: %(default)s)")
    out = Path(f"runs/verify_gpu-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--out", type=Path, default=out, help="new folder for page and logs (default: %(default)s)")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = ["--shape", args.shape, *(["--model", args.model] if args.model else [])]
    if args.stage:
        import gpu_stages

        gpu_stages.run(args.stage, Page(args.out, args.stage), args.model, args.shape)
        return
    names = args.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"--stages {unknown[0]}: allowed: {', '.join(STAGES)}")
    for name, value in (("minutes", args.minutes), ("jobs", args.jobs)):
        if not value >= (1 if name == "jobs" else 0.5):
            parser.error(f"--{name} {value}: allowed: {'1' if name == 'jobs' else '0.5'} or more")
    if args.out.exists():
        parser.error(f"--out {args.out}: exists; allowed: a new folder")

    import torch

    page = Page(args.out.resolve())
    slowdown = 1 if torch.cuda.is_available() else 10
    runner = Runner(page, options, time.monotonic() + 60 * args.minutes, slowdown)

    def stop(*_: object) -> None:
        page.add(WRONG, "the check", "ended by SIGTERM")
        runner.end()
        shutil.rmtree(page.folder / "work", ignore_errors=True)
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    if not args.model:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all models are local; a node may have no network
    # One group after the other. The compiler of `adam` and the GPU of `engine` do not disturb each other.
    groups = [["versions"], ["rules"], ["adam", "engine"], ["ppo"]]
    groups += [[name] for name, stage in STAGES.items() if stage.is_timed and name != "rules"]
    rest = [name for name in STAGES if not any(name in group for group in groups)]
    for group in [*groups, rest]:
        with ThreadPoolExecutor(args.jobs if group == rest else len(group)) as pool:
            list(pool.map(runner.run, [name for name in group if name in names]))
    shutil.rmtree(page.folder / "work", ignore_errors=True)  # models and checkpoints
    print(f"the page: {page.folder / 'report.md'}")
    if any(finding.status == WRONG for finding in page.findings()):
        sys.exit(1)


if __name__ == "__main__":
    main()
