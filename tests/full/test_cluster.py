"""A run that joins a cluster: one that is too small is refused, and one that is busy is waited for, until a signal."""

import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import pipeline
import pytest

HOLD = f"""
import sys
import time

import ray
from ray.util.placement_group import placement_group

ray.init(log_to_driver=False)
ray.get(placement_group([{{"GPU": 1, "CPU": 1}}]).ready())
print("held", flush=True)
time.sleep({pipeline.PATIENCE})
"""


LOOKS_OFTEN = """
from openrlhf_bapo.cli import train_ppo_ray
from openrlhf_bapo.run import cluster
cluster.EVERY = 5.0
train_ppo_ray.main()
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Start a cluster of one node with two pretended GPUs; yield its address."""
    port, log = pipeline.free_port(), tmp_path_factory.mktemp("ray") / "log"
    ray = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", f"--port={port}"]
    ray += ["--num-gpus=2", "--num-cpus=8", "--include-dashboard=false"]
    ray += [f"--ray-client-server-port={pipeline.free_port()}", "--disable-usage-stats"]
    # Elsewhere, other tests would find this cluster and join it.
    with pipeline.running(ray, log, RAY_TMPDIR=tempfile.mkdtemp(prefix="ray-")) as process:
        pipeline.wait_until(lambda: "Ray runtime started" in log.read_text(), process, log)
        yield f"127.0.0.1:{port}"


def command(directory: Path, **changes) -> list[str]:
    flags = pipeline.flags(directory, vllm__sync_backend="gloo", ds__param_dtype="fp32", **changes)
    return [pipeline.warm_python(), *pipeline.TRAIN, *flags]


def test_a_cluster_that_is_too_small_is_refused_with_what_is_wanted_and_what_there_is(address, tmp_path):
    directory = pipeline.make_model(tmp_path)
    with pipeline.running(
        command(directory, actor__num_gpus_per_node=4), tmp_path / "log", RAY_ADDRESS=address
    ) as process:
        assert process.wait() == 2
    said = (
        r"openrlhf-bapo: --actor.num_gpus_per_node: the run asks for 5 GPUs \(4 actor, 1 engines\); allowed: up to the "
        r"2 of the cluster \(\S+ has 2\), or a cluster with more nodes"
    )
    assert re.fullmatch(said, (tmp_path / "log").read_text().splitlines()[-1])


def test_a_busy_cluster_is_waited_for_with_a_line_and_a_signal_ends_the_wait(address, tmp_path):
    directory, log, hold = pipeline.make_model(tmp_path), tmp_path / "log", tmp_path / "hold.py"
    hold.write_text(HOLD)
    with pipeline.running([sys.executable, str(hold)], tmp_path / "held", RAY_ADDRESS=address) as holder:
        pipeline.wait_until(lambda: "held" in (tmp_path / "held").read_text(), holder, tmp_path / "held")
        often = [pipeline.warm_python(), "-c", LOOKS_OFTEN, *command(directory)[3:]]
        with pipeline.running(often, log, RAY_ADDRESS=address) as process:
            pipeline.wait_until(lambda: "waits until" in log.read_text(), process, log)
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait() == 143
    text = log.read_text()
    said = (
        r"waits until the cluster has room for PolicyModelActor; the run asks for 2 GPUs \(1 actor, 1 engines\); "
        r"0 of 2 are free \(\S+ has 2\); Ctrl-C ends the run"
    )
    assert re.search(said, text), text[-2000:]
    assert "the run has ended: SIGTERM, before its first step" in text
