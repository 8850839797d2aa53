#!/usr/bin/env bash
# Plants small faults into the modules, one at a time, and names those that no test notices (tools/mutation.py).
# Arguments: modules such as rules/clip_bounds.py (default: all); --sample N: only N mutants of each, drawn with a fixed
# seed; --survivors-of FILE: only the survivors of an earlier run.
# Takes an hour or two. Works in a copy of the tree. Appends a JSON line per mutant to RESULTS (runs/mutation.jsonl).
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
mkdir -p runs
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
git ls-files --cached --others --exclude-standard -z | xargs -0 cp --parents -t "$copy"
# Import the copy instead of the installed package, and never the bytecode of an earlier mutant.
export PYTHONPATH="$copy:$copy/tests/support" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
nice -n 10 .venv/bin/python "$copy/tools/mutation.py" --results "${RESULTS:-runs/mutation.jsonl}" "$@"
