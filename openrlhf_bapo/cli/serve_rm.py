"""`openrlhf.cli.serve_rm`, OpenRLHF's reward-model server, also on a machine without CUDA."""

import runpy
import sys

import openrlhf_bapo.openrlhf  # noqa: F401  (OpenRLHF on CPU)

UPSTREAM = "openrlhf.cli.serve_rm"


def main(argv: list[str]) -> None:
    """Serve until the process is stopped. All flags are OpenRLHF's (`openrlhf-bapo serve-rm --help`)."""
    sys.argv = [UPSTREAM, *argv]
    runpy.run_module(UPSTREAM, run_name="__main__")
