"""Runs scripts/train_bapo_slurm.sh under a real Slurm of two nodes on this machine, on the CPU, with a tiny model.

The policy trains on one node, and its engine is on the other. The nodes are network namespaces
(tests/support/nodes.py), each with a slurmd. Needs root and Debian's slurm-wlm. Four
jobs run one after the other: one to its end; one that gets SIGTERM, is requeued and goes on; one that its time limit
ends with a checkpoint; one whose second node cannot start Ray. Prints what each job said. Exit code 1: a job ended
otherwise.

    .venv/bin/python tools/slurm_trial.py
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests/support"))
import nodes
import pipeline
from patience import PATIENCE

NAMES = ("node1", "node2")
CONFIGURATION = """
ClusterName=trial
SlurmctldHost={controller}({outside})
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
FLAGS = {"vllm.sync_backend": "gloo", "ds.attn_implementation": "sdpa", "ds.param_dtype": "fp32", "actor.adam.lr": 1e-3}


@contextmanager
def slurm(folder: Path) -> Iterator[list[nodes.Node]]:
    """Start munge if need be, a controller and two nodes; SLURM_CONF then names their configuration."""
    place = nodes.random_place()
    with ExitStack() as undo:
        bridge = undo.enter_context(nodes.joined_network(place))
        temporary = Path(tempfile.mkdtemp(prefix="ray-"))
        found = []
        for number in range(1, len(NAMES) + 1):
            node = nodes.Node(bridge, f"{nodes.network(place)}.{number}", temporary)
            undo.callback(node.end)
            hosts = Path("/etc/netns", node.namespace)  # `ip netns exec` puts its files into /etc
            hosts.mkdir(parents=True)
            undo.callback(shutil.rmtree, hosts)
            lines = [f"{nodes.network(place)}.{n} {other}" for n, other in enumerate(NAMES, start=1)]
            (hosts / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
            found.append(node)
        by_name = dict(zip(NAMES, found, strict=True))
        lines = [f"NodeName={name} NodeAddr={node.address} CPUs=2 Gres=gpu:1" for name, node in by_name.items()]
        text = CONFIGURATION.format(
            controller=socket.gethostname(), outside=nodes.outside(place), folder=folder, nodes="\n".join(lines)
        )
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for name in ("state", *(f"spool-{name}" for name in NAMES)):
            (folder / name).mkdir()
        os.environ |= {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "RAY_TMPDIR": str(temporary),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        if not Path("/run/munge/munge.socket.2").exists():
            Path("/run/munge").mkdir(exist_ok=True)
            shutil.chown("/run/munge", "munge", "munge")
            munge = pipeline.running(["runuser", "-u", "munge", "--", "munged", "--foreground"], folder / "munged.log")
            undo.enter_context(munge)
        undo.enter_context(pipeline.running(["slurmctld", "-D"], folder / "controller"))
        for name, node in by_name.items():
            # A network namespace has a /sys of its own. slurmd asks for a folder of control groups there.
            steps = f'mount -t tmpfs none /sys/fs/cgroup && hostname {name} && exec "$@"'
            named = ["unshare", "--uts", "sh", "-c", steps, "sh", "slurmd", "-D", "-N", name]
            daemon = undo.enter_context(pipeline.running(node.command(*named), folder / name))
            pipeline.wait_until(lambda name=name: _state_of(name) == "idle", daemon, folder / name)
        yield found


def _state_of(node: str) -> str:
    command = ["sinfo", "--noheader", f"--nodes={node}", "--format=%T"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


class Job:
    """A job of the trial."""

    def __init__(self, folder: Path, name: str, *options: str, **variables: object) -> None:
        self.name, self.run, self.log = name, folder / name, folder / f"{name}.log"
        self.log.touch()
        environment = {
            "RECIPE": "scripts/train_bapo_async_partial.sh",
            "OVERRIDES": "tests/support/tiny_recipe.flags",
            "MODEL": folder / "model",
            "DATA": folder / "train.jsonl",
            "EVAL_DATA": folder / "train.jsonl",
            "REWARD": folder / "reward.py",
            "EVAL_N": 0,
            "SAVE_STEPS": 1,
            "RUN": self.run,
        } | variables
        steps = int(str(environment.pop("STEPS")))
        flags = FLAGS | {"data.max_samples": 8 * steps}
        command = [
            "sbatch",
            "--parsable",
            "--nodes=2",
            "--gpus-per-node=1",
            f"--output={self.log}",
            "--open-mode=append",
        ]
        command += [*options, "scripts/train_bapo_slurm.sh"]
        command += [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
        command.append("--vllm.enforce_eager")
        environment = os.environ | {key: str(value) for key, value in environment.items()}
        self.id = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    def state(self) -> tuple[str, str]:
        """Return Slurm's state and exit code (code:signal)."""
        text = subprocess.run(["scontrol", "show", "job", self.id], check=True, capture_output=True, text=True).stdout
        return re.search(r"JobState=(\w+)", text)[1], re.search(r" ExitCode=(\S+)", text)[1]

    def wait(self, *states: str, steps: int = 0) -> str:
        """Wait until the job is in one of these states and has made some steps; return its exit code.

        Raises:
            AssertionError: with the log's end, if it ends otherwise or takes too long.
        """
        end = time.monotonic() + PATIENCE
        while True:
            state, code = self.state()
            if state in states and len(re.findall(r"^\[.*\] step ", self.log.read_text(), re.MULTILINE)) >= steps:
                return code
            is_over = state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
            if is_over or time.monotonic() > end:
                raise AssertionError(
                    f"{self.name}: {state} ({code}), not {states} after {steps} steps:\n{self.log.read_text()[-3000:]}"
                )
            time.sleep(1)

    def report(self, code: str) -> str:
        """Print the job's end, and return its log."""
        text = self.log.read_text()
        print(
            f"\n== {self.name}: {self.state()[0]}, exit code {code}", *text.splitlines()[-8:], sep="\n   ", flush=True
        )
        return text

    def saved(self) -> str:
        """Return the newest checkpoint."""
        return (self.run / "checkpoints/_actor/latest").read_text()


def try_to_the_end(folder: Path) -> None:
    """A job of 3 steps ends by itself."""
    job = Job(folder, "to_the_end", STEPS=3)
    text = job.report(job.wait("COMPLETED"))
    assert "openrlhf-bapo: the run is complete" in text and job.saved() == "global_step3"


def try_requeue(folder: Path) -> None:
    """A job that gets SIGTERM leaves a checkpoint; requeued, it goes on to its end."""
    job = Job(folder, "requeued", "--requeue", STEPS=12)
    job.wait("RUNNING", steps=2)
    subprocess.run(["scancel", "--batch", "--signal=TERM", job.id], check=True)
    text = job.report(job.wait("FAILED"))
    assert job.state()[1] == "143:0" and "the run has ended: SIGTERM, after step" in text
    before = job.saved()
    subprocess.run(["scontrol", "requeue", job.id], check=True)
    text = job.report(job.wait("COMPLETED"))
    assert f"resuming from {job.run}/checkpoints" in text and job.saved() == "global_step12" != before


def try_time_limit(folder: Path) -> None:
    """A job that its time limit ends is told so before, and leaves a checkpoint of its last step."""
    job = Job(folder, "time_limit", "--time=4", "--signal=B:TERM@90", STEPS=1000)
    text = job.report(job.wait("FAILED"))
    assert job.state()[1] == "143:0"
    assert f"the run has ended: SIGTERM, after step {job.saved().removeprefix('global_step')}" in text


def try_a_node_without_ray(folder: Path, node: nodes.Node) -> None:
    """A job whose second node has no Ray ends with the node's name."""
    programs = pipeline.REPOSITORY / ".venv/bin"
    node.hide(programs, True, process="slurmd")
    try:
        job = Job(folder, "node_without_ray", STEPS=3)
        text = job.report(job.wait("FAILED"))
    finally:
        node.hide(programs, False, process="slurmd")
    assert "Ray has not started on node2; its output is above" in text


def main() -> None:
    """Run the trial."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = pipeline.make_model(Path(tempfile.mkdtemp(prefix="slurm-")))
    rows = [json.dumps({"input": f"{n % 100}+{n % 7}=", "label": "0"}) + "\n" for n in range(8000)]
    (folder / "train.jsonl").write_text("".join(rows))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder / "model")
    print(f"in {folder}", flush=True)
    with slurm(folder) as (_, other):
        try_a_node_without_ray(folder, other)
        try_to_the_end(folder)
        try_requeue(folder)
        try_time_limit(folder)
    print("\nevery job ended as it should")


if __name__ == "__main__":
    main()
