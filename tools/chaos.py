"""Training under faults that are drawn at random, and an account of what became of every prompt. See scripts/chaos.sh.

A tiny model is trained with replay and a token budget, with checkpoints on a small disk and rewards from a server that
this process holds. A fault hits the run a few training steps after its start; what ends it is resumed with the same
command and --ckpt.load_enable. A run goes on after a fault if it makes three steps more.

The steps that count are those that led to the last checkpoint: a step that was made again after a resume counts once.
Over them every prompt must have been trained on once, or dropped for a counted reason, or wait in the checkpoint; each
step must have begun with the version, the optimizer steps and the pool that the one before it left; the learning-rate
schedule must have made as many steps as the optimizer; the saved pool must be the trainer's. Every run's last ten lines
must say what ended it, and no process may be left.

With --nodes 2 the policy trains on two nodes, network namespaces that tests/support/nodes.py makes, and each run joins
a new Ray cluster of them. A node then dies, is cut off, stands still, or loses the shared folder, too.
"""

import argparse
import collections
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import nodes
import pipeline
import reward_server

from openrlhf_bapo.cli.progress import SILENT

BATCH, SAMPLES, NUM_PROMPTS = 8, 4, 24_000
DISK = 512 << 20  # bytes; below 64 MiB of free space a disk counts as full
PATIENCE = 600  # seconds until a run that neither steps nor ends is stuck
AWAY = 20  # seconds: reward server, network, shared folder
LAST_PROCESS = 600  # seconds until a process of a run that has ended is left; Ray's own take a minute or two

ENDED = "openrlhf-bapo: the run has ended: "
SLOW = "Ray did not start within its 30 s, on a busy machine"  # a cause that is none of ours: the fault comes again


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and how a run that it ends must say so."""

    name: str

    said: str
    """In the terminal's last ten lines: a regular expression."""

    code: tuple[int, ...] = (1,)
    """Exit codes."""

    process: str | None = None
    """A part of the command line of the process to kill."""


SIGTERM = Fault("SIGTERM", ENDED + "SIGTERM, after step", (143,))
FAULTS = [
    SIGTERM,
    Fault("SIGKILL: command", SILENT, (137,), "openrlhf_bapo.cli"),
    Fault("SIGKILL: trainer", ENDED + "the trainer .*died", process="ray::PPOTrainer"),
    Fault("SIGKILL: policy actor", ENDED + "an actor's process, which trains.* died", process="ray::PolicyModelActor"),
    Fault("SIGKILL: rollout engine", ENDED + "a rollout engine.* died", process="ray::RolloutRayActor"),
    Fault("SIGKILL: EngineCore", ENDED + "a rollout engine.* died", process="VLLM::EngineCore"),
    Fault("SIGKILL: raylet", f"{ENDED}|{SILENT}", (1, 134, 137), "raylet/raylet "),
    Fault("SIGKILL: gcs_server", f"{ENDED}|{SILENT}", (1, 134, 137), "gcs_server"),
    Fault("reward server away", ENDED + ".*--reward"),
    Fault("reward server: garbage", ENDED + ".*--reward"),
    Fault("disk full", ENDED + ".*disk .*is full"),
]
NODE_FAULTS = [
    Fault("node: dies", ENDED),
    Fault("node: stands still for 30 s", ENDED),
    Fault("node: cut off for 20 s", ENDED),
    Fault("node: cut off", ENDED),
    Fault("node: shared folder away for 20 s", ENDED),
    Fault("head node: dies", "", (137, -9)),  # the command is on it
]


@dataclass
class Attempt:
    """One run of the command."""

    fault: str
    at_step: int = 0
    """The last step before the fault."""

    outcome: str = ""
    """Exit code and cause, or that it went on."""

    seconds: float = 0.0
    """From the fault to the end, or to the third step after it."""

    resumed: int = 0
    """The step that the next run starts from."""

    redone: int = 0
    """Steps that were made and not saved."""

    problems: list[str] = field(default_factory=list)


def lineage(records: list[dict], last_step: int) -> list[dict]:
    """Return the steps that led to the checkpoint of `last_step`; a later run's replace an earlier's."""
    kept: dict[int, dict] = {}
    for record in records:
        kept = {step: other for step, other in kept.items() if step < record["step"]} | {record["step"]: record}
    return [record for step, record in sorted(kept.items()) if step <= last_step]


def account(steps: list[dict], waiting: list[str], prompts: set[str]) -> list[str]:
    """Return the problems in the steps of a `lineage`, one line per problem.

    Args:
        waiting: prompts that the last step's checkpoint holds, started and not trained on.
        prompts: all that there are.
    """
    problems = []
    if (numbers := [record["step"] for record in steps]) != list(range(1, len(steps) + 1)):
        problems.append(f"steps {sorted(set(range(1, max(numbers) + 1)) - set(numbers))} are missing")
    times = collections.Counter(prompt for record in steps for prompt in record["prompts"])
    problems += [f"{prompt!r} was trained on {n} times" for prompt, n in times.items() if n > 1]
    problems += [f"{prompt!r} was trained on, and waits" for prompt in waiting if prompt in times]
    problems += [f"{prompt!r} is no prompt" for prompt in [*times, *waiting] if prompt not in prompts]
    started, dropped = (
        int(sum(record["metrics"][f"partial/{name}"] for record in steps)) for name in ("started", "dropped")
    )
    if started != times.total() + dropped + len(waiting):
        problems.append(
            f"{started} prompts were started; {times.total()} were trained on, {dropped} dropped, {len(waiting)} wait"
        )
    for before, record in pairwise(steps):
        if before["after"] != record["before"]:
            problems.append(f"step {record['step']} began with {record['before']}, not {before['after']}")
    problems += [
        f"step {record['step']} has version {record['after']['version']}"
        for record in steps
        if record["after"]["version"] != record["step"]
    ]
    return problems


def check_checkpoint(checkpoints: Path, last: dict) -> tuple[list[str], list[str]]:
    """Return the problems in the checkpoint of the step whose record is `last`, and the prompts that wait in it."""
    import torch
    from chaos_record.sitecustomize import digest

    from openrlhf_bapo.offpolicy.replay_pool import ReplayConfig, ReplayPool

    tag, problems = f"global_step{last['step']}", []
    (file,) = (checkpoints / "_actor" / tag).glob("*model_states.pt")
    states = torch.load(file, weights_only=False)
    saved = json.loads((checkpoints / "_replay" / tag / "pool.json").read_text())
    pool, state = ReplayPool.load(checkpoints / "_replay" / tag, ReplayConfig(ratio=1, **REPLAY), saved["fingerprint"])
    found = {"version": state["policy_version"], "optimizer_steps": states["global_steps"], "pool": digest(pool)}
    if found != last["after"]:
        problems.append(f"{tag} holds {found}, and the trainer had {last['after']}")
    if states["lr_scheduler"]["last_epoch"] != last["after"]["optimizer_steps"]:
        problems.append(f"{tag}: the learning rate's step is {states['lr_scheduler']['last_epoch']}")
    partial = json.loads((checkpoints / "_partial" / tag / "pool.json").read_text())
    return problems, [group["prompt"] for group in partial["groups"]]


class RewardServer(reward_server.Server):
    """Rewards over HTTP, as OpenRLHF asks for them, until it is told to do otherwise."""

    is_garbage = False

    def __init__(self) -> None:
        super().__init__(self._answer, host="")
        self.start()

    def _answer(self, asked: dict) -> tuple[int, str]:
        rewards = [sum(c in "13579" for c in query) / 8 for query in asked["query"]]
        return 200, "<html>Bad gateway" if self.is_garbage else json.dumps({"rewards": rewards})


REPLAY = {"max_staleness": 4, "max_reuse": 2}


class Machine:
    """Where the runs are: here, each with its own Ray cluster."""

    outside = "127.0.0.1"
    """The address of the reward server for the run."""
    flags: Mapping[str, object] = {}
    """Flags of a run here."""

    @contextmanager
    def running(self, command: list[str], terminal: Path, **environment: str) -> Iterator[subprocess.Popen]:
        """Run a command until the context is left."""
        with pipeline.running(command, terminal, **environment) as run:
            self._run = run
            yield run

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the run."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._run.pid).children(recursive=True)
        return []

    def may_stay(self, process: psutil.Process) -> bool:
        """Say whether a process may outlive the run."""
        return False


class Cluster:
    """Two nodes; each run has a new cluster of them."""

    flags: Mapping[str, object] = {
        "actor__num_nodes": 2,
        "train__colocate_all": True,
        "vllm__num_engines": 2,
        "ds__param_dtype": "fp32",
    }

    def __init__(self, directory: Path) -> None:
        self._directory, self._number, self._place = directory, 0, nodes.random_place()
        self.outside = nodes.outside(self._place)

    @contextmanager
    def running(self, command: list[str], terminal: Path, **environment: str) -> Iterator[subprocess.Popen]:
        """Start the cluster and run a command on its head until the context is left."""
        self._number += 1
        folder = self._directory / f"{self._number}.cluster"
        folder.mkdir()
        with nodes.cluster(folder, self._place, **environment) as (cluster, self.head), cluster.joined() as self.other:
            self.may_go_on = {*self.head.pids(), *self.other.pids()}  # Ray's own
            with cluster.running(self.head, command, terminal) as run:
                yield run

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the nodes."""
        found = []
        for pid in self.head.pids() + self.other.pids():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def may_stay(self, process: psutil.Process) -> bool:
        """Say whether a process belongs to Ray, which goes on without the run, or to a node that is cut off."""
        with suppress(psutil.NoSuchProcess):
            return process.pid in self.may_go_on or "ray::IDLE" in " ".join(process.cmdline())
        return False


class Chaos:
    """The runs, one after the other, in one folder."""

    def __init__(self, directory: Path, seed: int, num_nodes: int = 1, only: str = "") -> None:
        self.directory, self.random = directory, random.Random(seed)
        self.checkpoints, self.record = directory / "disk/ckpt", directory / "steps.jsonl"
        self.attempts: list[Attempt] = []
        (directory / "disk").mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", directory / "disk"])
        self.faults = [fault for fault in FAULTS if fault.name != "disk full" or mounted.returncode == 0]
        if mounted.returncode:
            print("without a disk that is full: no file system can be mounted here", flush=True)
        self.is_mounted = mounted.returncode == 0
        pipeline.make_model(directory)
        rng = random.Random(0)
        inputs = [f"{rng.randrange(1000)}+{n}=" for n in range(NUM_PROMPTS)]
        self.prompts = set(inputs)
        (directory / "train.jsonl").write_text(
            "".join(json.dumps({"input": text, "label": ""}) + "\n" for text in inputs)
        )
        self.place = Cluster(directory) if num_nodes == 2 else Machine()
        self.faults += NODE_FAULTS if num_nodes == 2 else []
        self.faults = [fault for fault in self.faults if only in fault.name]
        self.server = RewardServer()
        self.flags = pipeline.flags(
            directory,
            policy_loss="bapo",
            data__max_len=48,
            data__max_samples=NUM_PROMPTS,
            reward__remote_url=f"http://{self.place.outside}:{self.server.port}",
            actor__lr_scheduler="linear",
            actor__adam__lr=1e-5,
            rollout__batch_size=BATCH,
            rollout__n_samples_per_prompt=SAMPLES,
            rollout__max_new_tokens=24,
            train__batch_size=16,
            replay__ratio=1,
            partial__token_budget=8,
            ckpt__path=self.checkpoints,
            ckpt__save_steps=2,
            ckpt__max_num=2,
            logger__tensorboard_dir=None,
            **{f"replay__{name}": value for name, value in REPLAY.items()},
            **self.place.flags,
        )

    def records(self) -> list[dict]:
        # The last line of a trainer that was killed may be cut off.
        lines = self.record.read_text().split("\n")[:-1] if self.record.exists() else []
        return [json.loads(line) for line in lines]

    def saved_step(self) -> int:
        latest = self.checkpoints / "_actor/latest"
        return int(re.search(r"\d+$", latest.read_text())[0]) if latest.exists() else 0

    def run(self, fault: Fault | None) -> None:
        """One run of the command: until a fault has ended it, or, where it goes on or none comes, until SIGTERM has."""
        number, first = len(self.attempts) + 1, self.saved_step()
        terminal, log = self.directory / f"{number}.terminal", self.directory / f"{number}.log"
        command = [".venv/bin/python", "-m", "openrlhf_bapo.cli.main", "train", *self.flags]
        command += ["--ckpt.load_enable"] if first else []
        script = 'set -euo pipefail; source scripts/follow.sh; follow "$@"'
        environment = {
            "CHAOS_RECORD": str(self.record),
            "PYTHONPATH": pipeline.python_path(Path(__file__).parent / "chaos_record"),
        }
        before = len(self.records())
        follow = ["bash", "-c", script, "run", str(log), "1", *command]
        with self.place.running(follow, terminal, **environment) as run:
            processes: set[psutil.Process] = set()

            def wait(happened) -> bool:
                """Whether it happened before the run ended, or PATIENCE did."""
                end = time.monotonic() + PATIENCE
                while run.poll() is None and time.monotonic() < end:
                    processes.update(self.place.processes())
                    if happened():
                        return True
                    time.sleep(0.2)
                return False

            num_steps = self.random.randint(2, 5)
            attempt = Attempt(fault.name if fault else "(SIGTERM, at the end)")
            self.attempts.append(attempt)
            if not wait(lambda: len(self.records()) >= before + num_steps):
                fault = None
                if re.search(ENDED + ".*timed out during startup", terminal.read_text()):
                    attempt.outcome = SLOW
                else:
                    attempt.problems.append("no step, or an end, before its fault")
            time.sleep(self.random.uniform(0, 2))  # anywhere in a step
            attempt.at_step = self.records()[-1]["step"] if self.records() else 0
            began, undo = time.monotonic(), None
            if fault:
                undo = self.inject(fault, run, processes)
                enough = len(self.records()) + 3
                if wait(lambda: len(self.records()) >= enough):
                    attempt.outcome, fault = "went on", None
                elif run.poll() is None:
                    attempt.problems.append(f"neither an end nor three steps in {PATIENCE} s")
                attempt.seconds = time.monotonic() - began
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
                fault = fault or SIGTERM
                if not wait(lambda: False) and run.poll() is None:
                    attempt.problems.append(f"no end {PATIENCE} s after SIGTERM")
            if undo:
                undo()
            self.check_end(attempt, fault, run, terminal, processes)
        attempt.resumed = self.saved_step()
        attempt.redone = max(0, (self.records() or [{"step": 0}])[-1]["step"] - attempt.resumed)

    def inject(self, fault: Fault, run: subprocess.Popen, processes: set[psutil.Process]):
        """Let it come; what ends it, or None."""
        if fault.process:
            for process in processes:
                with suppress(psutil.Error):
                    command = " ".join(process.cmdline())
                    if fault.process in command and process.cmdline()[0] != "bash":
                        process.kill()
        elif fault is SIGTERM:
            run.send_signal(signal.SIGTERM)
        elif fault.name == "disk full":
            ballast = self.directory / "disk/ballast"
            with suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
            return ballast.unlink
        elif fault.name == "reward server away":
            self.server.stop()
            return self.after_a_while(self.server.start)
        elif fault.name == "reward server: garbage":
            self.server.is_garbage = True
            return self.after_a_while(lambda: setattr(self.server, "is_garbage", False))
        elif fault in NODE_FAULTS:
            return self.inject_into_node(fault.name)

    def inject_into_node(self, name: str) -> Callable[[], object] | None:
        """Let a node's fault come; return its end, or None."""
        head, other = self.place.head, self.place.other
        if name == "node: stands still for 30 s":
            other.signal(signal.SIGSTOP)
            return self.after_a_while(lambda: other.signal(signal.SIGCONT), 30)
        if name.startswith("node: cut off"):
            other.connect(False)
            if name.endswith("20 s"):
                return self.after_a_while(lambda: other.connect(True))
            self.place.may_go_on.update(other.pids())  # nobody can end them
            return None
        if name == "node: shared folder away for 20 s":
            other.hide(self.directory / "disk", True)
            return self.after_a_while(lambda: other.hide(self.directory / "disk", False))
        (head if name == "head node: dies" else other).signal(signal.SIGKILL)

    @staticmethod
    def after_a_while(action: Callable[[], object], seconds: float = AWAY) -> Callable[[], None]:
        """Do something after a while; return a function that waits for it."""
        timer = threading.Timer(seconds, action)
        timer.start()
        return timer.join

    def check_end(self, attempt: Attempt, fault: Fault | None, run, terminal: Path, processes: set) -> None:
        """Note a problem if the run ended in another way than it should, did not say why, or left a process."""
        lines = terminal.read_text().splitlines()[-10:]
        if fault is not None:
            if run.poll() not in fault.code:
                attempt.problems.append(f"exit code {run.poll()}")
            said = [line for line in lines if re.search(fault.said, line)]
            if not said:
                attempt.problems.append(f"the last lines do not say {fault.said!r}")
                attempt.problems += [f"| {line[:200]}" for line in lines]
            attempt.outcome = attempt.outcome or f"{run.poll()}: {said[0].rpartition(ENDED)[2] if said else ''}"
        end = time.monotonic() + LAST_PROCESS
        while (
            left := [process for process in processes if is_left(process) and not self.place.may_stay(process)]
        ) and time.monotonic() < end:
            time.sleep(0.5)
        for process in left:
            with suppress(psutil.Error):
                attempt.problems.append(f"left: {process.pid} {' '.join(process.cmdline())[:80]}")
                process.kill()

    def account(self) -> list[str]:
        """Return the problems at the end, over all runs."""
        last = self.saved_step()
        steps = lineage(self.records(), last)
        if not last or not steps or steps[-1]["step"] != last:
            return [f"the last checkpoint is of step {last}, which nobody noted"]
        problems, waiting = check_checkpoint(self.checkpoints, steps[-1])
        started, dropped = (int(sum(r["metrics"][f"partial/{name}"] for r in steps)) for name in ("started", "dropped"))
        print(
            f"{last} steps count, of {len(self.records())} that were made; {started} prompts were started: "
            f"{sum(len(record['prompts']) for record in steps)} trained on, {dropped} dropped, {len(waiting)} wait"
        )
        return problems + account(steps, waiting, self.prompts)


def is_left(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def table(attempts: list[Attempt]) -> str:
    """Return the injected faults and their outcomes."""
    rows = [("fault", "at step", "seconds", "goes on from", "steps lost", "outcome")]
    rows += [
        (a.fault, str(a.at_step), f"{a.seconds:.0f}", str(a.resumed), str(a.redone), a.outcome[:100]) for a in attempts
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    """Run, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float, nargs="?", default=10)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--nodes", type=int, choices=[1, 2], default=1, help="(default: %(default)s); 2 needs root")
    parser.add_argument("--only", default="", metavar="TEXT", help="only faults with this text in their name")
    args = parser.parse_args()
    if not any(args.only in fault.name for fault in FAULTS + NODE_FAULTS * (args.nodes - 1)):
        parser.error(f"--only {args.only!r} is in the name of no fault")
    minutes, seed = args.minutes, args.seed
    if args.nodes == 2 and os.geteuid() != 0:
        parser.error("--nodes 2: only root can make network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `pipeline.running`, which ends the run
    began = time.monotonic()
    chaos = Chaos(Path(tempfile.mkdtemp(prefix="chaos-")), seed, args.nodes, args.only)
    print(f"in {chaos.directory}, seed {seed}, {minutes:g} minutes", flush=True)
    bag: list[Fault] = []
    while time.monotonic() - began < 60 * minutes - 60:
        # Every kind once, in random order, before any comes again.
        bag = bag or chaos.random.sample(chaos.faults, len(chaos.faults))
        chaos.run(bag[-1])
        if chaos.attempts[-1].outcome != SLOW:
            bag.pop()
        print(f"[{time.monotonic() - began:5.0f} s] {table(chaos.attempts[-1:]).splitlines()[1]}", flush=True)
        for problem in chaos.attempts[-1].problems:
            print(f"          {problem}", flush=True)
    chaos.run(None)
    problems = chaos.account()
    report = [table(chaos.attempts), *(f"{n}: {text}" for n, a in enumerate(chaos.attempts, 1) for text in a.problems)]
    report += problems or ["every prompt, version, optimizer step and pool is accounted for"]
    (chaos.directory / "report.txt").write_text("\n".join(report) + "\n")
    print("\n".join(report))
    chaos.server.stop()
    print(f"logs and this table: {chaos.directory}")
    if chaos.is_mounted:
        subprocess.run(["umount", chaos.directory / "disk"], check=False)
    return int(bool(problems or any(a.problems for a in chaos.attempts)))


if __name__ == "__main__":
    sys.exit(main())
