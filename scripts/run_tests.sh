#!/usr/bin/env bash
# run_tests.sh [--all] [PYTEST ARGUMENTS]: sets up if needed and runs the tests, two at a time.
# Without --all: tests/integration, tests/docs and tests/unit. With --all also tests/full, which takes longer.
# Folders, files or -k select fewer tests: run_tests.sh tests/unit -k staleness
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
# Tests of the pipeline come first, so that short tests fill the gaps at the end.
folders=(tests/integration tests/docs tests/unit)
if [ "${1:-}" = --all ]; then
  shift
  folders=(tests/full "${folders[@]}")
fi
for argument in "$@"; do
  case $argument in tests/*) folders=() ;; esac
done
export OMP_NUM_THREADS=1 # two processes share the cores
exec .venv/bin/python -m pytest -rs --durations=10 -n 2 --no-loadscope-reorder "${folders[@]}" "$@"
