#!/usr/bin/env bash
# Makes .venv-verl for the tests of openrlhf_bapo.verl: verl 0.9.1 and the packages that it pins, on top of .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh

stamp=.venv-verl/openrlhf-bapo.stamp
wanted="$PWD $(cat scripts/setup_verl.sh .venv/openrlhf-bapo.stamp | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
.venv/bin/python -m venv --without-pip .venv-verl
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(packages .venv/bin/python)')" >"$(packages .venv-verl/bin/python)/main.pth"
# .venv has their dependencies, except for the versions of transformers, antlr4 and trl, which verl imports.
UV_SYSTEM_CERTS=1 .venv/bin/uv pip install --quiet --python .venv-verl/bin/python --no-deps \
  verl==0.9.1 transformers==5.10.4 tensordict==0.10.0 pyvers==0.2.3 orjson==3.13.0 codetiming==1.4.0 \
  hydra-core==1.3.8 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 trl==0.27.0 TransferQueue==0.1.11
echo "$wanted" >"$stamp"
