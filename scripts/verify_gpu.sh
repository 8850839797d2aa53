#!/usr/bin/env bash
# Checks a GPU node: versions, GPU tests, the search's speed, the quickstart, and a few steps of a model with ppo, bapo
# and steady bounds. Writes a page that says what is right, what is wrong and what did not run.
# --model FOLDER_OR_NAME trains another model than Qwen2.5-0.5B; --help lists the other flags.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python tools/verify_gpu.py "$@"
