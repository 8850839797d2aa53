"""Checks the cluster that a run has joined: the GPUs of its nodes, their copy of this package, the shared folder.

Ray reserves GPUs in placement groups. If a cluster cannot hold one, Ray waits without end and without a word.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import openrlhf_bapo
from openrlhf_bapo.flags.checks import describe_gpus, gpu_groups, largest_group
from openrlhf_bapo.flags.mistakes import exit_with_one_line
from openrlhf_bapo.openrlhf.interrupts import is_training
from openrlhf_bapo.run.threads import is_ending, start_thread

EVERY, PATIENCE = 60.0, 300.0
"""Seconds between two looks at the cluster, and seconds that a node may take to answer."""

_FOLDERS = ("ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir")
_INPUTS = (
    *("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path", "reward.remote_url"),
    *("train.agent_func_path", "data.prompt_dataset", "eval.dataset"),
)
_REMEDY = "install the same copy on every node"


def check_nodes(args: Namespace) -> None:
    """End a run if another node lacks this package, has another copy of it, or does not see the checkpoints' folder.

    The run ends with one line and exit code 2. `args` are flat, names with dots.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    others = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    del others[here]
    if not others:
        return
    folder, ours = Path(vars(args)["ckpt.path"]), describe_package()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-every-node-") as file:
        look = functools.partial(ray.remote(_look).options, num_cpus=0, max_retries=0)
        asked = {
            address: look(scheduling_strategy=NodeAffinitySchedulingStrategy(id, soft=False)).remote(file.name)
            for id, address in others.items()
        }
        for address, answer in asked.items():
            try:
                theirs, sees = ray.get(answer, timeout=PATIENCE)
            except Exception as error:  # of any kind, because the node may have any other package in this one's place
                cause = str(error).strip().splitlines()[-1].strip()
                exit_with_one_line(f"node {address}: openrlhf-bapo does not start there ({cause}); {_REMEDY}")
            if theirs != ours:
                exit_with_one_line(f"node {address}: has openrlhf-bapo {theirs}, but here it is {ours}; {_REMEDY}")
            if not sees:
                problem = f"node {address} does not see a file that was written there"
                exit_with_one_line(f"--ckpt.path {folder}: {problem}; allowed: a folder that all nodes share")


def use_absolute_paths(args: Namespace) -> None:
    """Make local paths absolute, in place. Ray's workers begin in the folder in which `ray start` ran on their node.

    `args` are flat, names with dots. A name that is no file or folder here may be on the hub, and is kept.
    """
    values = vars(args)
    for name in _FOLDERS:
        if values[name]:
            values[name] = os.path.abspath(values[name])
    for name in _INPUTS:
        if values[name]:
            parts = [part.strip() for part in values[name].split(",")]
            is_here = [os.path.exists(part.split("@")[0]) for part in parts]
            parts = [os.path.abspath(part) if here else part for part, here in zip(parts, is_here, strict=True)]
            values[name] = ",".join(parts)


def describe_package() -> str:
    """Return the version of this package and a checksum of its source files."""
    folder, digest = Path(openrlhf_bapo.__file__).parent, hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return f"{openrlhf_bapo.__version__} ({digest.hexdigest()[:8]})"


def _look(file: str) -> tuple[str, bool]:
    """Return this node's version and checksum of the package, and whether the node sees a file."""
    return describe_package(), os.path.exists(file)


def wait_for_room(args: Namespace) -> None:
    """End a run that asks for more GPUs than the cluster has. If others use the GPUs, report what the run waits for.

    The run ends with one line and exit code 2. A thread reports the waiting until training begins. `args` are flat.
    """
    from openrlhf.utils.config import hierarchize

    groups, by_node = gpu_groups(hierarchize(args)), gpus_by_node()
    if sum(groups.values()) > sum(by_node.values()):
        allowed = f"up to the {sum(by_node.values())} of the cluster ({describe_nodes(by_node)})"
        asked = f"{largest_group(groups)}: the run asks for {describe_gpus(groups)}"
        exit_with_one_line(f"{asked}; allowed: {allowed}, or a cluster with more nodes")
    start_thread(_report_waiting, groups)


def gpus_by_node() -> dict[str, int]:
    """Return the number of GPUs of each living node by its address."""
    import ray

    return {node["NodeManagerAddress"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}


def describe_nodes(by_node: dict[str, int]) -> str:
    """Return the GPUs of each node in words."""
    return ", ".join(f"{address} has {num}" for address, num in by_node.items()) or "no nodes"


def _report_waiting(groups: dict[str, int]) -> None:
    import ray

    asked, before, seconds = describe_gpus(groups), set[str](), 0.0
    # After the connection has ended, the main thread says why.
    with contextlib.suppress(Exception):
        while not is_ending(seconds) and not is_training():
            waiting = _without_resources()
            # A process that starts has no resources for a moment, too.
            if both := sorted(name for id, name in waiting.items() if id in before):
                free, by_node = int(ray.available_resources().get("GPU", 0)), gpus_by_node()
                rooms = f"{free} of {sum(by_node.values())} are free ({describe_nodes(by_node)})"
                says = f"waits until the cluster has room for {', '.join(both)}; the run asks for {asked}; {rooms}"
                print(f"openrlhf-bapo: {says}; Ctrl-C ends the run", flush=True)
            before, seconds = set(waiting), EVERY


def _without_resources() -> dict[str, str]:
    """Return the requests of this Ray job that the cluster has not granted: names by id."""
    import ray
    from ray._private.state import actors
    from ray.util import placement_group_table

    job = ray.get_runtime_context().get_job_id()
    found = {
        id: f"a group of {len(group['bundles'])} GPUs"
        for id, group in placement_group_table().items()
        if id.endswith(job) and group["state"] in ("PENDING", "RESCHEDULING")
    }
    # An actor has a process as soon as it has resources.
    found |= {
        id: actor["ActorClassName"]
        for id, actor in actors().items()
        if actor["JobID"] == job and actor["State"] == "PENDING_CREATION" and not actor["Pid"]
    }
    return found
