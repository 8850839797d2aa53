"""Which Ray cluster a training command uses, without starting one."""

from argparse import Namespace

import pytest
import ray
from ray._private import services

from openrlhf_bapo.cli import train_ppo_ray
from openrlhf_bapo.openrlhf import registration
from openrlhf_bapo.run import cluster

ARGS = {"ds.param_dtype": "bf16", "ckpt.on_interrupt": True}


@pytest.fixture
def joined(tmp_path, monkeypatch):
    """Return a function that prepares a run for Ray, and returns the address of the cluster that it joins, or None."""
    (tmp_path / "ray_current_cluster").write_text("10.0.0.1:6379")  # as `ray start` leaves it
    find = services.canonicalize_bootstrap_address
    monkeypatch.setattr(ray, "init", lambda address=None, **_: find(address, tmp_path))
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setattr(registration, "runs_on_cpu", lambda: False)
    monkeypatch.setattr(train_ppo_ray, "catch_signals", lambda *_: None)
    for name in ("check_nodes", "wait_for_room"):
        monkeypatch.setattr(cluster, name, lambda _: None)

    def join(args: Namespace) -> str | None:
        train_ppo_ray._prepare_ray(args, [], [])
        return ray.init()

    return join


@pytest.mark.parametrize("address", [None, "", "10.0.0.2:6379"])
def test_a_run_joins_only_the_cluster_that_ray_address_names(joined, monkeypatch, address):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    assert joined(Namespace(**ARGS)) == (address or None)
