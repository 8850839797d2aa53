"""Which Ray cluster a training command uses, without starting one."""

from argparse import Namespace

import pytest
import ray
from ray._private import services

from openrlhf_bapo.cli import train_ppo_ray
from openrlhf_bapo.openrlhf import registration
from openrlhf_bapo.run import cluster

OUTPUTS = {"ckpt.path": "./ckpt/saved", "ckpt.output_dir": "ckpt", "logger.tensorboard_dir": None}
INPUTS = {
    "actor.model_name_or_path": "models/qwen",
    "critic.model_name_or_path": None,
    "reward.model_name_or_path": "",
    "reward.remote_url": "reward.py",
    "train.agent_func_path": "../agent.py",
    "data.prompt_dataset": "sums.jsonl, OWNER/NAME,folder@part",
    "eval.dataset": "sums.jsonl",
}
ARGS = {"ds.param_dtype": "bf16", "ckpt.on_interrupt": True} | OUTPUTS | INPUTS


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


def test_paths_are_absolute_for_the_workers_of_a_joined_cluster_which_begin_elsewhere(joined, tmp_path, monkeypatch):
    here = tmp_path / "here"
    for name in ("models/qwen", "folder"):
        (here / name).mkdir(parents=True)
    for name in ("reward.py", "../agent.py", "sums.jsonl"):
        (here / name).touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.2:6379")
    joined(args := Namespace(**ARGS))
    found = {name: vars(args)[name] for name in OUTPUTS | INPUTS}
    assert found == OUTPUTS | INPUTS | {
        "ckpt.path": f"{here}/ckpt/saved",
        "ckpt.output_dir": f"{here}/ckpt",
        "actor.model_name_or_path": f"{here}/models/qwen",
        "reward.remote_url": f"{here}/reward.py",
        "train.agent_func_path": f"{tmp_path}/agent.py",
        "data.prompt_dataset": f"{here}/sums.jsonl,OWNER/NAME,{here}/folder@part",
        "eval.dataset": f"{here}/sums.jsonl",
    }
