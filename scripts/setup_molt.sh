#!/usr/bin/env bash
# Makes .venv-molt for the tests of openrlhf_bapo.molt: molt-rl 0.2.1 and the versions that it asks for, on top of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh

stamp=.venv-molt/openrlhf-bapo.stamp
wanted="$PWD $(cat scripts/setup_molt.sh .venv/openrlhf-bapo.stamp | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
.venv/bin/python -m venv --without-pip .venv-molt
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(packages .venv/bin/python)')" >"$(packages .venv-molt/bin/python)/main.pth"
# .venv has the rest: its vLLM is older than the 0.32 that Molt is made with.
UV_SYSTEM_CERTS=1 .venv/bin/uv pip install --quiet --python .venv-molt/bin/python --no-deps \
  molt-rl==0.2.1 nemo-automodel==0.7.0 ray==2.59.0 tokenizers==0.23.3 torchao==0.18.0 transformers==5.18.0 \
  orjson==3.13.0 vllm-router==0.1.17
echo "$wanted" >"$stamp"
