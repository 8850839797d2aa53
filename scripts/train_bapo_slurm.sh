#!/usr/bin/env bash
# A recipe on several nodes of a Slurm cluster: starts a Ray head on the first node and a Ray worker on each other one.
#   sbatch --nodes 8 scripts/train_bapo_slurm.sh
#   RECIPE=scripts/train_bapo_qwen7b.sh sbatch --nodes 2 scripts/train_bapo_slurm.sh
# The repository and .venv must be on a file system that all nodes share. sbatch passes the recipe's variables on.
# Further arguments go to the training command. DRY_RUN=1 makes only the recipe's plan (with bash, not sbatch).
#SBATCH --job-name=openrlhf-bapo
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.log
# SIGTERM this many seconds before the time limit, for a whole training step and a checkpoint. It goes to this script
# (B:), because Ray must outlive it.
#SBATCH --signal=B:TERM@1800
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}"

RECIPE=${RECIPE:-scripts/train_bapo_qwen32b.sh}
PORT=${PORT:-6379} # of the Ray head

export NUM_NODES=${NUM_NODES:-${SLURM_JOB_NUM_NODES:-8}}
export GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}
if [ -n "${DRY_RUN:-}" ]; then
  exec bash "$RECIPE" "$@"
fi

bash scripts/setup.sh
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [ "$NUM_NODES" != ${#nodes[@]} ]; then
  echo "NUM_NODES=$NUM_NODES: allowed: the ${#nodes[@]} nodes of the job, or unset" >&2
  exit 2
fi
head=${nodes[0]}
on() { srun --nodes 1 --ntasks 1 --overlap --nodelist "$@"; }
# The first IPv4 address that is not a loopback's; on some nodes the host's name has none.
address=$({ on "$head" hostname --ip-address && on "$head" hostname --all-ip-addresses; } | tr ' ' '\n' |
  awk '!found && /^[0-9.]+$/ && !/^127\./ { found = $0 } END { print found }')
if [ -z "$address" ]; then
  echo "$head: no IPv4 address but a loopback's in hostname --ip-address and --all-ip-addresses" >&2
  exit 1
fi

on "$head" .venv/bin/ray start --block --head --node-ip-address "$address" --port "$PORT" \
  --num-gpus "$GPUS_PER_NODE" &
starts=("$!")
sleep 10
for node in "${nodes[@]:1}"; do
  on "$node" .venv/bin/ray start --block --address "$address:$PORT" --num-gpus "$GPUS_PER_NODE" &
  starts+=("$!")
done

export RAY_ADDRESS=$address:$PORT
started=$SECONDS
# Ray waits without end for a head that has died.
until [ "$(timeout 60 .venv/bin/python -c 'import ray; ray.init(log_to_driver=False); print(len(ray.nodes()))' 2>/dev/null)" = "$NUM_NODES" ]; do
  for number in "${!starts[@]}"; do
    if ! kill -0 "${starts[$number]}" 2>/dev/null; then
      echo "Ray has not started on ${nodes[$number]}; its output is above" >&2
      exit 1
    fi
  done
  if [ $((SECONDS - started)) -gt 300 ]; then
    echo "fewer than $NUM_NODES nodes have joined Ray at $RAY_ADDRESS after 300 s" >&2
    exit 1
  fi
  sleep 5
done
exec bash "$RECIPE" "$@" # the job ends with it, and Slurm then ends Ray on every node
