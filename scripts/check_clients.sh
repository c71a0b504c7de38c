#!/usr/bin/env bash
# Runs the examples of docs/other-clients.md with the real clients, in their own environment.
#   scripts/check_clients.sh            needs Python 3.11 and 3.12 or newer, Node.js 22 or newer, npm
#   scripts/check_clients.sh --record   also records the clients' requests, which the tests replay
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ "${1:-}" == "--record" ]] && export RECORD_CLIENTS=1
environment=.venv-clients
scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh "$environment" requirements/clients.txt
# SIE's client needs a newer Python than the service.
newer=$(command -v python3.13 || command -v python3.12)
PYTHON=$newer scripts/pinned_environment.sh "$environment/sie" requirements/sie.txt
digest=$(cat tests/clients/package*.json | sha256sum)
if [[ "$(cat "$environment/node/installed" 2>/dev/null)" != "$digest" ]]; then
  rm -rf "$environment/node"
  mkdir "$environment/node"
  cp tests/clients/package*.json "$environment/node"
  npm ci --prefix "$environment/node" --no-audit --no-fund
  echo "$digest" > "$environment/node/installed"
fi
installed=$SECONDS
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q tests/clients
echo "Installing took $installed seconds, and the clients' tests $((SECONDS - installed))."
