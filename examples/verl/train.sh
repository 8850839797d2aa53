#!/usr/bin/env bash
# verl's GRPO with BAPO's clip bounds on GSM8K. docs/verl.md says what to install. A checkout of verl v0.9.1 makes
# the data: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Arguments are settings of verl: bash examples/verl/train.sh actor_rollout_ref.actor.policy_loss.preset=steady
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
exec python -m openrlhf_bapo.verl_main --config-path "$here" --config-name bapo \
  data.train_files="${DATA:-$HOME/data/gsm8k}/train.parquet" data.val_files="${DATA:-$HOME/data/gsm8k}/test.parquet" \
  data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=1024 \
  actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" "$@"
