#!/usr/bin/env bash
# BAPO on a 32B model with 64k responses: DeepSeek-R1-Distill-Qwen-32B on 8 nodes of 8 GPUs of 80 GiB, where training
# and rollout take turns. `DRY_RUN=1 bash scripts/train_bapo_qwen32b.sh` checks everything and prints the plan.
# scripts/launch.sh has all other variables that can be set from outside. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

# One of the paper's backbones (section 5.1). Its own BP-Math-32B is not released.
MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-32B}
NUM_NODES=${NUM_NODES:-8}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-4} # GPUs per rollout engine (ours: leaves room for the KV of 64k tokens)
RING_ATTN=${RING_ATTN:-8}             # GPUs that share a sequence in training (ours: 64k x 152k logits fit no GPU)
PRESET=${PRESET:-paper}               # target 0.4, bounds in [0.6, 0.9] and [1.2, 3.0]: section 5.1
MAX_RESPONSE=${MAX_RESPONSE:-65536}   # tokens: the paper's for BP-Math (section 5.1); ours for this model

source scripts/launch.sh
ACTOR_GPUS_PER_NODE=$GPUS_PER_NODE
FLAGS+=(
  --train.colocate_all
  --train.max_tokens_per_gpu $(((MAX_PROMPT + MAX_RESPONSE + RING_ATTN - 1) / RING_ATTN)) # a ring holds any sample
  --ds.ring_attn_size "$RING_ATTN"
  --ds.enable_sleep
  --vllm.num_engines $((NUM_NODES * GPUS_PER_NODE / TENSOR_PARALLEL))
  --vllm.tensor_parallel_size "$TENSOR_PARALLEL"
  --vllm.gpu_memory_utilization 0.8
  --vllm.enable_sleep
  --data.apply_chat_template
)
launch "$@"
