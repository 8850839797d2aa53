#!/usr/bin/env bash
# Serves the math grader at http://HOST:PORT/get_reward, for --reward.remote_url, until it is stopped.
# Further flags go to `openrlhf-bapo serve-math-reward`, e.g. --time_limit 10.
set -euo pipefail
cd "$(dirname "$0")/.."

HOST=${HOST:-127.0.0.1}  # 0.0.0.0 for runs on other machines; then anyone who reaches the port can use the grader
PORT=${PORT:-5000}
WORKERS=${WORKERS:-$(nproc)}  # grading processes

bash scripts/setup.sh
exec .venv/bin/openrlhf-bapo serve-math-reward --host "$HOST" --port "$PORT" --workers "$WORKERS" "$@"
