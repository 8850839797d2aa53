#!/usr/bin/env bash
# Installs Chromium for the check of the docs' pages (tools/pages.py), unless a Chromium or Chrome is there.
set -euo pipefail
for program in chromium chromium-browser google-chrome; do
  if command -v "$program" >/dev/null; then exit 0; fi
done
if ! command -v apt-get >/dev/null; then
  echo "setup_browser.sh: no chromium, and no apt-get to install it with; install Chromium or Chrome" >&2
  exit 1
fi
root=()
[ "$(id -u)" = 0 ] || root=(sudo --non-interactive)
echo "[setup] Chromium, for the check of the docs' pages"
log=$(mktemp)
trap 'status=$?; [ $status -eq 0 ] || { echo "setup failed; its last lines:"; tail -n 20 "$log"; }; rm -f "$log"' EXIT
"${root[@]}" apt-get update >"$log" 2>&1
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends chromium >>"$log" 2>&1
