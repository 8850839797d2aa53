#!/usr/bin/env bash
# Responses that several policies wrote: under a token budget a rollout ends before its longest responses, which
# continue in the next one (the paper's section 5.3 and Figure 12, budgets of 2k and 4k).
# DeepSeek-R1-Distill-Qwen-7B with 8k responses (ours) on one node of 8 GPUs of 80 GiB where training and rollout take turns.
# `DRY_RUN=1 bash scripts/train_bapo_partial.sh` checks everything and prints the plan. scripts/launch.sh has all other
# variables that can be set from outside. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

BUDGET=${BUDGET:-2048}        # tokens per rollout: 2k or 4k (the paper's section 5.3)
OVERSAMPLE=${OVERSAMPLE:-1.5} # prompts in flight per prompt that a rollout needs (ours)
METHOD=${METHOD:-${PRESET:+bapo}} # with PRESET: BAPO's rule (section 5.1: PRESET=paper)
METHOD=${METHOD:-tapered}         # what our study advises for stale data (docs/study.md)

source scripts/launch.sh
FLAGS+=(--partial.token_budget "$BUDGET" --partial.oversample "$OVERSAMPLE")
colocate
FLAGS+=(--data.apply_chat_template)
launch "$@"
