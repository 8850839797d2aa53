"""Runs OpenRLHF's own command without CUDA: with our CPU backend in every process, and nothing else of ours."""

import runpy
import sys

import ray

import openrlhf_bapo.openrlhf  # noqa: F401  (registers the CPU backend)

ray.init(
    num_gpus=8,
    num_cpus=10,
    include_dashboard=False,
    runtime_env={"worker_process_setup_hook": "openrlhf_bapo.openrlhf.cpu.register"},
)
sys.argv[0] = "openrlhf.cli.train_ppo_ray"
runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
