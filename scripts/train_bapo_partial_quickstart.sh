#!/usr/bin/env bash
# The quickstart under a token budget, on a task with a heavy tail of response lengths: division by repeated
# subtraction, where half of the responses have 3 tokens and a few have hundreds. BUDGET=0 removes the budget.
# scripts/train_bapo_quickstart.sh has the other variables. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

METHOD=${METHOD:-${PRESET:+bapo}}
export METHOD=${METHOD:-tapered} # what our study advises for stale data (docs/study.md); METHOD=bapo: steady bounds
export TASK=remainder
export RUNS=${RUNS:-runs/partial_quickstart}
export STEPS=${STEPS:-100}     # global steps of 16 prompts x 4 samples; 100 steps use every prompt once
export EVAL_STEPS=${EVAL_STEPS:-50}
export PROMPTS=16
BUDGET=${BUDGET:-64}           # tokens that a response may grow by in one rollout
OVERSAMPLE=${OVERSAMPLE:-1.5}  # prompts in flight per prompt that a rollout needs

# The longest responses take ten rollouts or more, so a low --partial.max_staleness would drop them.
exec bash scripts/train_bapo_quickstart.sh \
  --partial.token_budget "$BUDGET" \
  --partial.oversample "$OVERSAMPLE" \
  --partial.max_staleness 16 \
  --data.max_len 600 \
  --rollout.max_new_tokens 594 \
  --rollout.n_samples_per_prompt 4 \
  --rollout.micro_batch_size 64 \
  --ds.packing_samples \
  --train.dynamic_batch_enable \
  --train.max_tokens_per_gpu 2048 \
  --eval.n_samples_per_prompt 2 \
  "$@"
