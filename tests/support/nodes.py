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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pipeline
import pytest

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

    def end(self) -> None:
        """End all processes of the node at once, as a loss of power does, and remove it."""
        for pid in _ip("netns", "pids", self.namespace).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
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
    """

    def __init__(self, bridge: str, network: str, folder: Path, variables: dict[str, str]) -> None:
        self.head_address = f"{network}.1"
        self._bridge, self._network, self._folder, self._num_nodes = bridge, network, folder, 0
        self._temporary = Path(tempfile.mkdtemp(prefix="ray-"))
        # gloo would take the address that belongs to the host's name, which is one of another network.
        self._variables = {
            "RAY_TMPDIR": str(self._temporary),
            "RAY_ADDRESS": f"{self.head_address}:{PORT}",
            "GLOO_SOCKET_IFNAME": "eth0",
        } | variables

    @contextmanager
    def joined(self, hidden: Path | None = None, **variables: str) -> Iterator[Node]:
        """Start the next node, with one pretended GPU; end it when the context is left.

        Args:
            hidden: a folder that is empty on this node.
            **variables: environment variables of this node alone.
        """
        self._num_nodes += 1
        node = Node(self._bridge, f"{self._network}.{self._num_nodes}", self._temporary, hidden)
        options = [f"--address={self.head_address}:{PORT}"]
        if node.address == self.head_address:
            options = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        options += [f"--node-ip-address={node.address}", "--num-gpus=1", "--num-cpus=4"]
        options += ["--object-store-memory=200000000", "--disable-usage-stats"]
        ray, log = str(Path(sys.executable).parent / "ray"), self._folder / f"{node.address}.log"
        command = node.command(ray, "start", "--block", *options)
        try:
            with pipeline.running(command, log, **self._variables | variables) as process:
                pipeline.wait_until(lambda: "Ray runtime started" in log.read_text(), process, log)
                yield node
        finally:
            node.end()

    def run(self, node: Node, directory: Path, argv: list[str], name: str) -> tuple[int, str]:
        """Run a training command on a node to its end, and return its exit code and output."""
        log = directory / f"{name}.log"
        with pipeline.running(node.command(sys.executable, *pipeline.TRAIN, *argv), log, **self._variables) as process:
            code = process.wait(900)
        return code, log.read_text()

    def train(self, node: Node, directory: Path, argv: list[str], name: str) -> str:
        """Do the same, and fail if the exit code is not 0; return the output."""
        code, output = self.run(node, directory, argv, name)
        assert code == 0, f"{name} ended with {code}:\n{output[-5000:]}"
        return output


@contextmanager
def cluster(folder: Path, **variables: str) -> Iterator[tuple[Cluster, Node]]:
    """Start a cluster of one node, the head; yield the cluster and the node.

    Args:
        folder: of the logs.
        **variables: environment variables of every process of a run.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can make network namespaces")
    # Several clusters at once have different names and networks.
    place = random.SystemRandom().randrange(1 << 16)
    bridge = f"node{place}"
    with ExitStack() as undo:
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        found = Cluster(bridge, f"10.{place >> 8}.{place & 255}", folder, variables)
        yield found, undo.enter_context(found.joined())
