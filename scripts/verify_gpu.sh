#!/usr/bin/env bash
# Checks a GPU node in stages, each with a time limit: versions, clip rules, an engine alone, the quickstart's task
# through the whole pipeline, a model of real shape with ppo, bapo and steady bounds, resume, replay, a token budget, TRL.
# Writes a page that says what is right, what is wrong and what did not run. --help lists stages and flags:
#   bash scripts/verify_gpu.sh --minutes 10 --jobs 3     --stages versions,engine,ppo     --model FOLDER_OR_NAME
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec .venv/bin/python tools/verify_gpu.py "$@"
