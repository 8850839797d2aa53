#!/usr/bin/env bash
# BAPO in verl on a laptop without a GPU: verl's whole trainer, on two ranks, teaches a tiny policy to write odd digits.
# Settings of verl may follow: bash examples/verl/laptop.sh actor_rollout_ref.actor.policy_loss.preset=steady, or
# actor_rollout_ref.actor.policy_loss.rule=examples/my_rule.py:Sapo
# VENV=FOLDER is an environment that scripts/setup_framework.sh has made; without it, one is made in .venv-verl.
set -euo pipefail
cd "$(dirname "$0")/../.."
if nvidia-smi -L >/dev/null 2>&1; then
  echo "examples/verl/laptop.sh: this machine has a GPU; allowed: one without (with a GPU: bash examples/verl/train.sh)" >&2
  exit 2
fi
RUNS=${RUNS:-$PWD/runs/verl}

if [ -z "${VENV:-}" ]; then
  VENV=$PWD/.venv-verl
  bash scripts/setup_framework.sh verl
fi
.venv/bin/python examples/digits.py "$RUNS/start"

run=$RUNS/$(date +%Y%m%d-%H%M%S)
mkdir -p "$run"
echo "training in $run (the whole output goes to train.log)"
export PATH="$VENV/bin:$PATH" PYTHONPATH="$PWD/examples/verl${PYTHONPATH:+:$PYTHONPATH}"
export VERL_USE_EXTERNAL_MODULES=verl_cpu TENSORBOARD_DIR=$run/tensorboard
export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" # GiB; else half of the memory, filled with zeros
small=(
  trainer.total_training_steps=8 trainer.val_before_train=False
  data.train_batch_size=16 data.max_prompt_length=8 data.max_response_length=8 data.dataloader_num_workers=0
  actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.optim.lr=1e-3
  actor_rollout_ref.rollout.max_model_len=64
)
policy_loss=actor_rollout_ref.actor.policy_loss
if [[ " $* " != *"policy_loss.rule="* ]]; then # this task's share is near a half
  small+=("+$policy_loss.search.contribution=gradient" "+$policy_loss.search.positive_contribution_target=0.56")
fi
# What verl needs where there is no GPU; verl_cpu.py has the rest. Ray only counts the CPUs that verl asks for.
on_cpu=(
  trainer.device=cpu trainer.n_gpus_per_node=2 +ray_kwargs.ray_init.num_gpus=2 ray_kwargs.ray_init.num_cpus=16
  actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
  actor_rollout_ref.model.use_remove_padding=False +actor_rollout_ref.model.override_config.attn_implementation=sdpa
  actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.free_cache_engine=False
  +actor_rollout_ref.rollout.enable_sleep_mode=False actor_rollout_ref.rollout.agent.num_workers=1
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
  reward.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1
)
MODEL=$RUNS/start/model DATA=$RUNS/start bash examples/verl/train.sh trainer.save_freq=20 "${small[@]}" "${on_cpu[@]}" \
  reward.custom_reward_function.path="$PWD/examples/digits.py" \
  trainer.default_local_dir="$run/checkpoints" hydra.run.dir="$run/hydra" "$@" 2>&1 | tee "$run/train.log" |
  sed -unE 's|.*step:([0-9]+) - .*critic/score/mean:([0-9.]+).*|step \1: mean reward \2|p' ||
  { tail -20 "$run/train.log" >&2 && exit 1; }
.venv/bin/openrlhf-bapo plot "$run/tensorboard" -o "$run/curves.png"
