#!/usr/bin/env bash
# setup_framework.sh verl|molt: makes .venv-verl or .venv-molt for the tests of openrlhf_bapo.verl or openrlhf_bapo.molt.
# Each has the framework and the versions that it asks for, on top of .venv, which has their other dependencies.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in
  verl) # which imports trl, and pins antlr4
    packages=(verl==0.9.1 transformers==5.10.4 tensordict==0.10.0 pyvers==0.2.3 orjson==3.13.0 codetiming==1.4.0
      hydra-core==1.3.8 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 trl==0.27.0 TransferQueue==0.1.11) ;;
  molt) # which is made with vLLM 0.32; .venv has an older one
    packages=(molt-rl==0.2.1 nemo-automodel==0.7.0 ray==2.59.0 tokenizers==0.23.3 torchao==0.18.0
      transformers==5.18.0 orjson==3.13.0 vllm-router==0.1.17) ;;
  *) echo "setup_framework.sh ${1:-}: allowed: verl, molt" >&2; exit 2 ;;
esac
bash scripts/setup.sh

venv=.venv-$1
stamp=$venv/openrlhf-bapo.stamp
wanted="$PWD $(cat scripts/setup_framework.sh .venv/openrlhf-bapo.stamp | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
.venv/bin/python -m venv --without-pip "$venv"
folder() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(folder .venv/bin/python)')" >"$(folder "$venv/bin/python")/main.pth"
UV_SYSTEM_CERTS=1 .venv/bin/uv pip install --quiet --python "$venv/bin/python" --no-deps "${packages[@]}"
echo "$wanted" >"$stamp"
