#!/usr/bin/env bash
# BAPO on a laptop without a GPU: trains a tiny policy that walks on a grid, in OpenRLHF's pipeline. Everything is
# written to runs/quickstart: the start (the policy and its problems, made once) and one folder per run.
# METHOD=grpo trains a baseline instead (scripts/method.sh). TASK=chain_sum MAX_NEW_TOKENS=8 trains on additions.
# Further flags go to the training command, e.g. --bapo.positive_contribution_target 0.4. DRY_RUN=command makes the start
# and prints the training command, to run it by hand.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${DRY_RUN:-} in "" | command) ;; *) echo "DRY_RUN=$DRY_RUN: allowed in the quickstarts: command" >&2 && exit 2 ;; esac
RUNS=${RUNS:-runs/quickstart}
TASK=${TASK:-walk}            # a task of examples/quickstart/prepare.py
SEED=${SEED:-0}               # of the initial policy; 0 is in examples/quickstart/policies, others are fine-tuned
STEPS=${STEPS:-60}            # global steps of 32 prompts x 8 samples; 100 steps use every prompt once
PROMPTS=${PROMPTS:-32}        # prompts per rollout; the partial quickstart has 16
EVAL_STEPS=${EVAL_STEPS:-20}  # global steps between evaluations
MAX_NEW_TOKENS=${MAX_NEW_TOKENS:-40}
UPDATES=${UPDATES:-8}         # optimizer steps per 256 samples (a rollout of 32 prompts) and epoch: 1, 2, 4, 8 or 16
EPOCHS=${EPOCHS:-1}           # passes over a rollout
if [ "${METHOD:-bapo}" = bapo ]; then PRESET=${PRESET:-steady}; fi  # ours; paper and readme search in each update
source scripts/method.sh

source scripts/numbers.sh
check_numbers 1 STEPS PROMPTS UPDATES MAX_NEW_TOKENS
episodes=$(((STEPS + 99) / 100))
steps_per_episode=$(((STEPS + episodes - 1) / episodes))

bash scripts/setup.sh
target=$(.venv/bin/python -c '
import sys
from openrlhf_bapo.flags.train_flags import check_flags
flags = vars(check_flags(sys.argv[1:]))
is_share = flags.get("bapo.target_kind") == "share"
print(flags["balanced.target"] or is_share and flags["bapo.positive_contribution_target"] or "")
' "${METHOD_FLAGS[@]}" "$@")
if [ "${DRY_RUN:-}" = command ]; then exec 3>&1 >&2; fi
.venv/bin/python examples/quickstart/prepare.py --task "$TASK" --seed "$SEED" "$RUNS/start"

run=$RUNS/$(date +%Y%m%d-%H%M%S)
if [ "${DRY_RUN:-}" != command ]; then
  mkdir -p "$RUNS"
  mkdir "$run" 2>/dev/null || { run+=-$$; mkdir "$run"; } # two runs that start in the same second
fi
command=(.venv/bin/python -m openrlhf_bapo.cli.train_ppo_ray
  "${METHOD_FLAGS[@]}"
  --actor.model_name_or_path "$RUNS/start/model"
  --actor.num_gpus_per_node 1
  --actor.adam.lr 1e-4
  --actor.lr_scheduler constant
  --ds.attn_implementation sdpa
  --vllm.num_engines 1
  --data.prompt_dataset "$RUNS/start/train.jsonl"
  --data.label_key label
  --data.max_len $((24 + MAX_NEW_TOKENS))
  --data.max_samples $((PROMPTS * steps_per_episode))
  --reward.remote_url examples/quickstart/reward.py
  --algo.advantage.estimator group_norm
  --algo.kl.init_coef 0
  --rollout.batch_size "$PROMPTS"
  --rollout.n_samples_per_prompt 8
  --rollout.micro_batch_size 256
  --rollout.max_new_tokens "$MAX_NEW_TOKENS"
  --train.batch_size $((256 / UPDATES))
  --train.num_episodes "$episodes"
  --train.max_epochs "$EPOCHS"
  --train.micro_batch_size $((UPDATES > 8 ? 16 : 32))
  --eval.at_start
  --eval.dataset "$RUNS/start/heldout.jsonl"
  --eval.steps "$EVAL_STEPS"
  --eval.temperature 1.0
  --ckpt.best_metric_key none
  --ckpt.path "$run/checkpoints"
  --ckpt.output_dir "$run/model"
  --logger.tensorboard_dir "$run/tensorboard"
  "$@"
)
if [ "${DRY_RUN:-}" = command ]; then
  printf '%q ' "${command[@]}" >&3
  exit
fi
echo "training in $run ($((episodes * steps_per_episode)) steps; the whole output goes to train.log)"
source scripts/follow.sh
follow "$run/train.log" 5 "${command[@]}"

.venv/bin/openrlhf-bapo plot "$run/tensorboard" -o "$run/curves.png" ${target:+--target "$target"}
