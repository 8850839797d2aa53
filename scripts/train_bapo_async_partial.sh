#!/usr/bin/env bash
# Stale data: rollout never waits for training, and responses continue across weight updates (partial rollouts).
# DeepSeek-R1-Distill-Qwen-7B on one node of 8 GPUs of 80 GiB: half of them train, half roll out.
# `DRY_RUN=1 bash scripts/train_bapo_async_partial.sh` checks everything and prints the plan. scripts/launch.sh has all
# other variables that can be set from outside. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

ACTOR_GPUS_PER_NODE=${ACTOR_GPUS_PER_NODE:-4} # GPUs that train
QUEUE=${QUEUE:-2}                             # rollouts that may wait, the highest staleness in versions (ours)
METHOD=${METHOD:-${PRESET:+bapo}} # with PRESET: BAPO's rule (section 5.1: PRESET=paper)
METHOD=${METHOD:-tapered}         # what our study advises for stale data (docs/study.md)

source scripts/launch.sh
ENGINES=${ENGINES:-$((NUM_NODES * 4))} # rollout engines, one GPU each
FLAGS+=(
  --train.async_enable
  --train.async_queue_size "$QUEUE"
  --train.partial_rollout_enable
  --train.max_tokens_per_gpu "$MAX_TOKENS"
  --vllm.num_engines "$ENGINES"
  --vllm.gpu_memory_utilization 0.9
  --data.apply_chat_template
)
launch "$@"
