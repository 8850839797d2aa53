#!/usr/bin/env bash
# chaos.sh [MINUTES] [SEED] [--nodes 2] [--only TEXT]: trains a tiny model with replay and partial rollouts under random
# faults. Resumes after each fault that ends the run, and accounts for every prompt, policy version and process at the
# end. Exit code 1: something is unaccounted for. tools/chaos.py describes the faults and the checks. --nodes 2 needs root,
# --only takes the faults that have TEXT in their name.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
# The fault "disk full" mounts a small file system, which needs root, or a namespace in which this user is root.
inside=(unshare --mount)
if [ "$EUID" -ne 0 ]; then inside+=(--map-root-user); fi
if ! "${inside[@]}" true 2>/dev/null; then inside=(); fi
exec "${inside[@]}" .venv/bin/python tools/chaos.py "$@"
