#!/usr/bin/env bash
# Generates a TypeScript client from /openapi.json, compiles it with `strict`, and calls a server.
#   scripts/check_generated_clients.sh            needs Node.js 20 or newer, and npm
#   scripts/check_generated_clients.sh --install  only installs the generator, for ./run_tests.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-generated
digest=$(cat tests/clients/generated/package*.json | sha256sum)
if [[ "$(cat "$environment/installed" 2>/dev/null)" != "$digest" ]]; then
  rm -rf "$environment"
  mkdir "$environment"
  cp tests/clients/generated/package*.json "$environment"
  npm ci --prefix "$environment" --no-audit --no-fund
  echo "$digest" > "$environment/installed"
fi
[[ "${1:-}" == "--install" ]] && exit
scripts/test_environment.sh .venv-tests
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q tests/clients/test_generated.py
