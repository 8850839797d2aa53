#!/usr/bin/env bash
# chaos.sh [MINUTES] [SEED]: trains a tiny model with replay and partial rollouts while faults that are drawn at random
# hit it, resumes after each that ends the run, and at the end accounts for every prompt, version and process.
# Exit code 1: something is unaccounted for. What it does and checks: tools/chaos.py.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
# A disk that can be full is a file system of its own, which takes root's rights, or a namespace in which one has them.
inside=()
if unshare --map-root-user --mount true 2>/dev/null; then inside=(unshare --map-root-user --mount); fi
exec "${inside[@]}" .venv/bin/python tools/chaos.py "${1:-10}" "${2:-0}"
