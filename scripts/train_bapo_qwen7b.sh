#!/usr/bin/env bash
# BAPO on DeepSeek-R1-Distill-Qwen-7B with 8k responses, the paper's validation setting (section 5.1), on one node of 8
# GPUs of 80 GiB where training and rollout take turns. `DRY_RUN=1 bash scripts/train_bapo_qwen7b.sh` checks everything
# and prints the plan. scripts/launch.sh has all other variables that can be set from outside. Further flags go to the
# training command.
set -euo pipefail
cd "$(dirname "$0")/.."

PRESET=${PRESET:-paper} # target 0.4, bounds in [0.6, 0.9] and [1.2, 3.0]: section 5.1

source scripts/launch.sh
colocate
FLAGS+=(--data.apply_chat_template)
launch "$@"
