#!/usr/bin/env bash
# BAPO on responses that several policies wrote: under a token budget a rollout ends before its longest responses do, and
# they go on in the next one (the paper's section 5.3 and Figure 12: budgets of 2k and 4k at 8k responses).
# DeepSeek-R1-Distill-Qwen-7B on one node of 8 GPUs of 80 GiB where training and rollout take turns.
# `DRY_RUN=1 bash scripts/train_bapo_partial.sh` checks everything and prints the plan; scripts/launch.sh names what else
# can be set from outside. Further flags go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-7B} # the paper's validation (section 5.1)
DATA=${DATA:-$PWD/data/skywork-or1.jsonl} # SkyWork-OR1-RL (the paper's section 5.1); made if it is not there
EVAL_DATA=${EVAL_DATA:-$PWD/data/aime24.jsonl $PWD/data/aime25.jsonl}
REWARD=${REWARD:-$PWD/examples/math_reward.py} # a reward-function file, or http://HOST:PORT/get_reward[,...]
RUN=${RUN:-$PWD/runs/partial}

NUM_NODES=${NUM_NODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
GPU_MEMORY=${GPU_MEMORY:-80}          # GiB a GPU, for the plan
MAX_TOKENS=${MAX_TOKENS:-16384}       # tokens a GPU trains on at once (ours)

BUDGET=${BUDGET:-2048}                # tokens a rollout: 2k or 4k (the paper's section 5.3)
OVERSAMPLE=${OVERSAMPLE:-1.5}         # prompts in flight per prompt that a rollout needs (ours)
PRESET=${PRESET:-paper}               # target 0.4, bounds in [0.6, 0.9] and [1.2, 3.0]: section 5.1
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

ACTOR_GPUS_PER_NODE=$GPUS_PER_NODE
FLAGS=(
  --partial.token_budget "$BUDGET"
  --partial.oversample "$OVERSAMPLE"
  --train.colocate_all
  --train.max_tokens_per_gpu "$MAX_TOKENS"
  --ds.enable_sleep
  --vllm.num_engines $((NUM_NODES * GPUS_PER_NODE))
  --vllm.gpu_memory_utilization 0.7
  --vllm.enable_sleep
  --data.apply_chat_template
)

source scripts/launch.sh
launch "$@"
