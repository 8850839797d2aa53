"""Runs OpenRLHF's own command without CUDA: with our CPU backend in every process, and nothing else of ours.

If UPSTREAM_BROADCASTS is empty, actors send no weights to the engines, which OpenRLHF 0.11.2 cannot with LoRA.
"""

import os
import runpy
import sys

import ray

import openrlhf_bapo.openrlhf  # noqa: F401  (registers the CPU backend)


def register_without_broadcasts() -> None:
    """Register the CPU backend alone, and leave out broadcasts."""
    import wrapt

    from openrlhf_bapo.openrlhf import cpu

    def leave_out(ppo_actor) -> None:
        ppo_actor.ActorPPOTrainer.broadcast_to_vllm = lambda self: None

    cpu.register()
    wrapt.register_post_import_hook(leave_out, "openrlhf.trainer.ray.ppo_actor")


broadcasts = os.environ.get("UPSTREAM_BROADCASTS", "1")
ray.init(
    num_gpus=8,
    num_cpus=10,
    include_dashboard=False,
    runtime_env={
        "worker_process_setup_hook": "openrlhf_bapo.openrlhf.cpu.register"
        if broadcasts
        else register_without_broadcasts
    },
)
sys.argv[0] = "openrlhf.cli.train_ppo_ray"
runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
