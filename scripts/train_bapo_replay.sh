#!/usr/bin/env bash
# The quickstart on stale data: each training step replays as many past prompt groups as it generates new ones, at most
# four policy versions old. Further flags go to the training command, e.g. --replay.max_staleness 8.
set -euo pipefail
cd "$(dirname "$0")/.."

METHOD=${METHOD:-${PRESET:+bapo}}
export METHOD=${METHOD:-tapered} # what our study advises for stale data (docs/study.md); METHOD=bapo: steady bounds

exec bash scripts/train_bapo_quickstart.sh \
  --replay.ratio 1 \
  --replay.max_staleness 4 \
  --replay.max_reuse 2 \
  --replay.strategy advantage \
  "$@"
