#!/usr/bin/env bash
# Makes .venv on a node without a network from a bundle of scripts/collect_bundle.sh: install_bundle.sh FOLDER.
# --on PYTHON: .venv also has the packages of the environment of that interpreter, such as its torch. PYTHON=... names
# the interpreter otherwise. Checks everything first; until the new .venv is whole, an earlier one stays.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-$(command -v python3.11 || command -v python3)}" tools/bundle.py install "$@"
