#!/usr/bin/env bash
# The quickstart under a token budget, on a task whose responses have a heavy tail of lengths: division by repeated
# subtraction, half of the responses with 3 tokens, a few with hundreds. BUDGET=0 is the same run without a budget.
# What else can be set from outside: scripts/train_bapo_quickstart.sh. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

export TASK=remainder
export RUNS=${RUNS:-runs/partial_quickstart}
export STEPS=${STEPS:-50}    # 50 use every prompt once
BUDGET=${BUDGET:-32}         # tokens that a response may grow by in one rollout
OVERSAMPLE=${OVERSAMPLE:-2}  # prompts in flight per prompt that a rollout needs

exec bash scripts/train_bapo_quickstart.sh \
  --partial.token_budget "$BUDGET" \
  --partial.oversample "$OVERSAMPLE" \
  --data.max_len 600 \
  --rollout.max_new_tokens 594 \
  --ds.packing_samples \
  --train.dynamic_batch_enable \
  --train.max_tokens_per_gpu 2048 \
  "$@"
