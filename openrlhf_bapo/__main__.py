"""Lets `python -m openrlhf_bapo` be the command `openrlhf-bapo`."""

from openrlhf_bapo.cli.main import main

main()
