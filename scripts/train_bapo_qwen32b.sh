#!/usr/bin/env bash
# BAPO on a 32B model with 64k responses: DeepSeek-R1-Distill-Qwen-32B on 8 nodes of 8 GPUs of 80 GiB, where training and
# rollout take turns. `DRY_RUN=1 bash scripts/train_bapo_qwen32b.sh` checks everything and prints the plan;
# scripts/launch.sh names what else can be set from outside. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

# Paths must be the same on every node.
# The paper trains an SFT model of its own at 32B (section 5.1), which is not released: this start is ours.
MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-32B}
DATA=${DATA:-$PWD/data/skywork-or1.jsonl} # SkyWork-OR1-RL (the paper's section 5.1); made if it is not there
EVAL_DATA=${EVAL_DATA:-$PWD/data/aime24.jsonl $PWD/data/aime25.jsonl}
REWARD=${REWARD:-$PWD/examples/math_reward.py} # a reward-function file, or http://HOST:PORT/get_reward[,...]
RUN=${RUN:-$PWD/runs/qwen32b}

NUM_NODES=${NUM_NODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
GPU_MEMORY=${GPU_MEMORY:-80}          # GiB a GPU, for the plan
TENSOR_PARALLEL=${TENSOR_PARALLEL:-4} # GPUs a rollout engine (ours: leaves room for the KV of 64k tokens)
RING_ATTN=${RING_ATTN:-8}             # GPUs that share a sequence in training (ours: 64k x 152k logits fit no GPU)

PRESET=${PRESET:-readme}              # target 0.5 (the authors' README; section 5.1: 0.4), [0.6, 0.9] and [1.2, 3.0]
LEARNING_RATE=${LEARNING_RATE:-2e-6}  # ours: that of the paper's 7B validation
TEMPERATURE=${TEMPERATURE:-0.6}       # ours: that of the paper's 7B validation
MAX_PROMPT=${MAX_PROMPT:-1024}        # tokens (ours)
MAX_RESPONSE=${MAX_RESPONSE:-65536}   # tokens: the paper's 64k (section 5.1)
SAMPLES=${SAMPLES:-16}                # responses a prompt (the authors' released example)
PROMPTS=${PROMPTS:-128}               # prompts a rollout (ours)
UPDATES=${UPDATES:-4}                 # optimizer steps a rollout and epoch (ours; the released example: 4)
EPOCHS=${EPOCHS:-1}                   # passes over a rollout (ours; the released example: 2)
EPISODES=${EPISODES:-1}               # passes over the prompts (ours)
SAVE_STEPS=${SAVE_STEPS:-20}          # rollouts between checkpoints (ours)
EVAL_STEPS=${EVAL_STEPS:-20}          # rollouts between evaluations (ours)
EVAL_N=${EVAL_N:-16}                  # responses a problem (section 5.1's evaluation: 16 rollouts); 0: no evaluation

ACTOR_GPUS_PER_NODE=$GPUS_PER_NODE
FLAGS=(
  --train.colocate_all
  --train.max_tokens_per_gpu $(((MAX_PROMPT + MAX_RESPONSE + RING_ATTN - 1) / RING_ATTN)) # the longest sample fits a ring
  --ds.ring_attn_size "$RING_ATTN"
  --ds.enable_sleep
  --vllm.num_engines $((NUM_NODES * GPUS_PER_NODE / TENSOR_PARALLEL))
  --vllm.tensor_parallel_size "$TENSOR_PARALLEL"
  --vllm.gpu_memory_utilization 0.8
  --vllm.enable_sleep
  --data.apply_chat_template
)

source scripts/launch.sh
launch "$@"
