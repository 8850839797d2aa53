#!/usr/bin/env bash
# Collects what a node without a network needs, on a machine that has one: collect_bundle.sh FOLDER [--piece_mb 50].
# FOLDER and this repository are then copied to the node, where scripts/install_bundle.sh makes .venv. DEVICE=gpu collects
# for GPUs; PYTHON names the interpreter, whose version (3.11) must be the node's. docs/running.md has all flags.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=()
case " $* " in *" --venv"*) ;; *)
  bash scripts/setup.sh
  venv=(--device "$(cut -d ' ' -f 1 .venv/openrlhf-bapo.stamp)") ;;
esac
exec "${PYTHON:-$(command -v python3.11 || command -v python3)}" tools/bundle.py collect "${venv[@]}" "$@"
