#!/usr/bin/env bash
# Sets up if needed and runs the tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python -m pytest -rs --durations=5 "$@"
