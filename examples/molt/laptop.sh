#!/usr/bin/env bash
# BAPO in Molt on a laptop without a GPU: Molt's whole command, on two ranks with asynchronous rollouts, teaches a tiny
# policy to write odd digits. Further flags may follow: bash examples/molt/laptop.sh --bapo.preset steady, or
# --policy_loss examples/my_rule.py:Sapo
# VENV=FOLDER is an environment that scripts/setup_framework.sh has made; without it, one is made in .venv-molt.
set -euo pipefail
cd "$(dirname "$0")/../.."
if nvidia-smi -L >/dev/null 2>&1; then
  echo "examples/molt/laptop.sh: this machine has a GPU; allowed: one without (with a GPU: see docs/molt.md)" >&2
  exit 2
fi
RUNS=${RUNS:-$PWD/runs/molt}

if [ -z "${VENV:-}" ]; then
  VENV=$PWD/.venv-molt
  bash scripts/setup_framework.sh molt
fi
.venv/bin/python examples/digits.py "$RUNS/start"

run=$RUNS/$(date +%Y%m%d-%H%M%S)
mkdir -p "$run"
echo "training in $run (the whole output goes to train.log)"
flags=(
  --actor.model_name_or_path "$RUNS/start/model" --actor.num_gpus_per_node 2 --actor.adam.lr 1e-3
  --actor.gradient_checkpoint none --fsdp.attn_implementation sdpa
  --data.prompt_dataset "$RUNS/start/train.jsonl" --data.label_key label --data.max_len 32 --data.max_samples 128
  --train.agent_path examples/molt/laptop_agent.py --train.batch_size 64 --train.micro_batch_size 32
  --algo.advantage.estimator grpo
  --rollout.batch_size 16 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 8 --rollout.num_runners 1
  --vllm.num_engines 1 --vllm.sync_backend gloo --vllm.enforce_eager
  --ckpt.path "$run/checkpoints" --ckpt.output_dir "$run/model" --logger.tensorboard_dir "$run/tensorboard"
)
if [[ " $* " != *" --policy_loss "* ]]; then # this task's share is near a half
  flags+=(--policy_loss bapo --bapo.contribution gradient --bapo.positive_contribution_target 0.56)
fi
PYTHONPATH="$PWD/examples/molt/cpu${PYTHONPATH:+:$PYTHONPATH}" \
  "$VENV/bin/python" -m openrlhf_bapo.molt "${flags[@]}" "$@" 2>&1 | tee "$run/train.log" |
  sed -unE "s|.*Global step ([0-9]+): .*'reward': '?([0-9.]+).*|step \1: mean reward \2|p" ||
  { tail -20 "$run/train.log" >&2 && exit 1; }
.venv/bin/openrlhf-bapo plot "$run/tensorboard" -o "$run/curves.png"
