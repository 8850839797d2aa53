"""Ray clusters of several nodes on this machine.

Each node is a network namespace with an address of its own, on a bridge that joins them, and a folder of its own for
Ray's files. That needs root.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pipeline
import pytest
from patience import PATIENCE

PORT = 6379


class Node:
    """A node of a cluster, as a network namespace.

    Args:
        bridge: name of the bridge to the other nodes.
        address: the node's address.
        temporary: Ray's folder for all nodes; each node sees another one there.
        hidden: a folder that is empty on this node.
    """

    def __init__(self, bridge: str, address: str, temporary: Path, hidden: Path | None = None) -> None:
        self.namespace = f"{bridge}-{address.rpartition('.')[2]}"
        self.address, self.temporary = address, temporary
        own, empty = temporary / self.namespace, temporary / f"{self.namespace}-empty"
        for folder in (own, empty):
            folder.mkdir()
        self._mounts = [f"mount --bind {empty} {hidden}"] if hidden else []
        self._mounts.append(f"mount --bind {own} {temporary}")
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self.namespace, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("link", "set", self.namespace, "master", bridge, "up")
        _ip("-n", self.namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for interface in ("eth0", "lo"):
            _ip("-n", self.namespace, "link", "set", interface, "up")

    def command(self, *command: str) -> list[str]:
        """Return a command that runs another one on this node."""
        steps = " && ".join([*self._mounts, 'exec "$@"'])
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", steps, "sh", *command]

    def pids(self) -> list[int]:
        """Return the ids of all processes of the node."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the node; SIGKILL is a loss of power."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def connect(self, is_connected: bool) -> None:
        """Cut the node's network, or mend it."""
        _ip("link", "set", self.namespace, "up" if is_connected else "down")

    def hide(self, folder: Path, is_hidden: bool, process: str = "raylet/raylet") -> None:
        """Put an empty folder that cannot be written in a folder's place, for a process and its own; or undo that."""
        change = ["mount", "-t", "tmpfs", "-o", "ro", "none"] if is_hidden else ["umount", "-l"]
        of = next(pid for pid in self.pids() if process.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())
        subprocess.run(["nsenter", "--mount", f"--target={of}", *change, folder], check=True)

    def end(self) -> None:
        """End all processes of the node at once, and remove it."""
        self.signal(signal.SIGKILL)
        # The namespace lasts as long as its last process. Without its link the next node can have its name.
        _ip("link", "delete", self.namespace)
        _ip("netns", "delete", self.namespace)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Cluster:
    """A Ray cluster, whose head and further nodes are started as docs/running.md says.

    Args:
        bridge: name of the bridge between the nodes.
        network: the first three numbers of the nodes' addresses.
        folder: of the logs.
        variables: environment variables of every process of a run.
        python: the command of Python that starts Ray on each node.
        dashboard: whether the head takes jobs, at `jobs_url`.
    """

    def __init__(
        self,
        bridge: str,
        network: str,
        folder: Path,
        variables: dict[str, str],
        python: Sequence[str] = (sys.executable,),
        dashboard: bool = False,
    ) -> None:
        self.head_address = f"{network}.1"
        self._bridge, self._network, self._folder, self._num_nodes = bridge, network, folder, 0
        self._python, self._dashboard = python, dashboard
        self.jobs_url = f"http://{self.head_address}:8265"
        self._temporary = Path(tempfile.mkdtemp(prefix="ray-"))
        # gloo would take the address that belongs to the host's name, which is one of another network.
        self._variables = {
            "RAY_TMPDIR": str(self._temporary),
            "RAY_ADDRESS": f"{self.head_address}:{PORT}",
            "GLOO_SOCKET_IFNAME": "eth0",
            # The head ends when one of the dashboard's parts has not started in 30 s, which a loaded machine may take.
            "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": str(PATIENCE),
        } | variables

    @contextmanager
    def joined(self, hidden: Path | None = None, **variables: str) -> Iterator[Node]:
        """Start the next node, with one pretended GPU; end it when the context is left.

        Args:
            hidden: a folder that is empty on this node.
            **variables: environment variables of this node alone, which starts cold.
        """
        self._num_nodes += 1
        node = Node(self._bridge, f"{self._network}.{self._num_nodes}", self._temporary, hidden)
        options = [f"--address={self.head_address}:{PORT}"]
        if node.address == self.head_address:
            options = ["--head", f"--port={PORT}"]
            options += ["--dashboard-host=0.0.0.0"] if self._dashboard else ["--include-dashboard=false"]
        options += [f"--node-ip-address={node.address}", "--num-gpus=1", "--num-cpus=4"]
        options += ["--object-store-memory=200000000", "--disable-usage-stats"]
        ray, log = str(Path(sys.executable).parent / "ray"), self._folder / f"{node.address}.log"
        python = [sys.executable] if variables else self._python
        command = node.command(*python, ray, "start", "--block", *options)
        try:
            with pipeline.running(command, log, **self._variables | variables) as process:
                pipeline.wait_until(lambda: "Ray runtime started" in log.read_text(), process, log)
                yield node
        finally:
            node.end()

    def running(self, node: Node, command: list[str], log: Path) -> AbstractContextManager[subprocess.Popen]:
        """Run a command on a node in the background, until the context is left."""
        return pipeline.running(node.command(*command), log, **self._variables)

    def run(self, node: Node, directory: Path, argv: list[str], name: str) -> tuple[int, str]:
        """Run a training command on a node to its end, in fp32, and return its exit code and output."""
        log = directory / f"{name}.log"
        command = [sys.executable, *pipeline.TRAIN, *argv, "--ds.param_dtype", "fp32"]
        with self.running(node, command, log) as process:
            code = process.wait()
        return code, log.read_text()


def network(place: int) -> str:
    """Return the first three numbers of the addresses of the cluster at a place."""
    return f"10.{place >> 8}.{place & 255}"


def outside(place: int) -> str:
    """Return the address of this machine, as the nodes of the cluster at a place see it."""
    return f"{network(place)}.254"


def random_place() -> int:
    """Return a place for a cluster. Several clusters at once have different places."""
    return random.SystemRandom().randrange(1 << 16)


@contextmanager
def joined_network(place: int) -> Iterator[str]:
    """Make the bridge of the nodes at a place; yield its name."""
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    bridge = f"node{place}"
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("address", "add", f"{outside(place)}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        yield bridge
    finally:
        _ip("link", "delete", bridge)


@contextmanager
def cluster(
    folder: Path, place: int | None = None, options: Mapping[str, Any] = MappingProxyType({}), **variables: str
) -> Iterator[tuple[Cluster, Node]]:
    """Start a cluster of one node, the head; yield the cluster and the node.

    Args:
        folder: of the logs.
        place: from `random_place`; None: another one for every cluster.
        options: further arguments of `Cluster`.
        **variables: environment variables of every process of a run.
    """
    place = random_place() if place is None else place
    with joined_network(place) as bridge:
        found = Cluster(bridge, network(place), folder, variables, **options)
        with found.joined() as head:
            yield found, head
