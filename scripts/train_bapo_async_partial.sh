#!/usr/bin/env bash
# BAPO on stale data: rollout never waits for training, and responses go on across weight updates (partial rollouts).
# DeepSeek-R1-Distill-Qwen-7B on one node of 8 GPUs of 80 GiB: half of them train, half roll out.
# `DRY_RUN=1 bash scripts/train_bapo_async_partial.sh` checks everything and prints the plan; scripts/launch.sh names
# what else can be set from outside. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-7B} # the paper's validation (section 5.1)
DATA=${DATA:-$PWD/data/skywork-or1.jsonl} # SkyWork-OR1-RL (the paper's section 5.1); made if it is not there
EVAL_DATA=${EVAL_DATA:-$PWD/data/aime24.jsonl $PWD/data/aime25.jsonl}
REWARD=${REWARD:-$PWD/examples/math_reward.py} # a reward-function file, or http://HOST:PORT/get_reward[,...]
RUN=${RUN:-$PWD/runs/async_partial}

NUM_NODES=${NUM_NODES:-1}
GPU_MEMORY=${GPU_MEMORY:-80}          # GiB a GPU, for the plan
ACTOR_GPUS_PER_NODE=${ACTOR_GPUS_PER_NODE:-4}
ENGINES=${ENGINES:-$((NUM_NODES * 4))} # rollout engines, one GPU each
MAX_TOKENS=${MAX_TOKENS:-16384}       # tokens a GPU trains on at once (ours)
QUEUE=${QUEUE:-2}                     # rollouts that may wait: samples are at most so many policy versions old (ours)

PRESET=${PRESET:-readme}              # target 0.5 (the authors' README; section 5.1: 0.4), [0.6, 0.9] and [1.2, 3.0]
LEARNING_RATE=${LEARNING_RATE:-2e-6}  # the paper's validation (section 5.1)
TEMPERATURE=${TEMPERATURE:-0.6}       # the paper's validation (section 5.1)
MAX_PROMPT=${MAX_PROMPT:-1024}        # tokens (ours)
MAX_RESPONSE=${MAX_RESPONSE:-8192}    # tokens: 8k, the paper's validation (section 5.1)
SAMPLES=${SAMPLES:-16}                # responses a prompt (the authors' released example)
PROMPTS=${PROMPTS:-128}               # prompts a rollout (ours)
UPDATES=${UPDATES:-4}                 # optimizer steps a rollout and epoch (ours; the released example: 4)
EPOCHS=${EPOCHS:-1}                   # passes over a rollout (ours; the released example: 2)
EPISODES=${EPISODES:-1}               # passes over the prompts (ours)
SAVE_STEPS=${SAVE_STEPS:-20}          # rollouts between checkpoints (ours)
EVAL_STEPS=${EVAL_STEPS:-20}          # rollouts between evaluations (ours)
EVAL_N=${EVAL_N:-16}                  # responses a problem (section 5.1's evaluation: 16 rollouts); 0: no evaluation

FLAGS=(
  --train.async_enable
  --train.async_queue_size "$QUEUE"
  --train.partial_rollout_enable
  --train.max_tokens_per_gpu "$MAX_TOKENS"
  --vllm.num_engines "$ENGINES"
  --vllm.gpu_memory_utilization 0.9
  --data.apply_chat_template
)

source scripts/launch.sh
launch "$@"
