#!/usr/bin/env bash
# BAPO on OctoThinker-3B (Llama 3.2) with the paper's bounds for it, on one node of 8 GPUs of 80 GiB where training and
# rollout take turns. `DRY_RUN=1 bash scripts/train_bapo_octothinker3b.sh` checks everything and prints the plan.
# scripts/launch.sh has all other variables that can be set from outside. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-OctoThinker/OctoThinker-3B-Long-Zero} # the paper's (section 5.1)
PRESET=${PRESET:-octothinker} # target 0.45, bounds in [0.8, 0.9] and [1.2, 2.0]: appendix A, which names no steps
TEMPLATE=${TEMPLATE:-$'<|begin_of_text|>Question: {}\n\nAnswer:'} # a base model has no chat template (ours)

source scripts/launch.sh
colocate
FLAGS+=(--data.input_template "$TEMPLATE")
EVAL_FLAGS+=(--input_template "$TEMPLATE")
launch "$@"
