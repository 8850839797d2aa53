"""`openrlhf.cli.train_ppo_ray` with BAPO: all of its flags and ours, in the same Ray pipeline."""

import argparse
import functools
import os
import sys

from openrlhf_bapo.adapter.arguments import run_upstream


def main(argv: list[str] | None = None) -> None:
    """Train. Flags from `argv`, or from the command line; a mistake ends with one line and exit code 2."""
    run_upstream(sys.argv[1:] if argv is None else argv, prepare=_prepare_ray, start=lambda: None)


def _prepare_ray(args: argparse.Namespace) -> None:
    """Let OpenRLHF's `ray.init`, which comes after its own checks, set up every worker with our registration."""
    import ray
    import torch

    from openrlhf_bapo.adapter import cpu
    from openrlhf_bapo.adapter.registration import WORKER_SETUP_HOOK

    resources = {}
    if not torch.cuda.is_available() and not os.environ.get("RAY_ADDRESS"):
        cpu.adapt_flags(args)
        resources = cpu.ray_resources(args)
    upstream = ray.init

    @functools.wraps(upstream)
    def init(*positional, runtime_env=None, **kwargs):
        runtime_env = {**(runtime_env or {}), "worker_process_setup_hook": WORKER_SETUP_HOOK}
        return upstream(*positional, runtime_env=runtime_env, **kwargs | resources)

    ray.init = init


if __name__ == "__main__":
    main()
