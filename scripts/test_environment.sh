#!/usr/bin/env bash
# Makes the environment of the tests, unless it is there: scripts/test_environment.sh FOLDER
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1
python=${PYTHON:-python3}
locks=(requirements/torch-cpu.lock requirements/service.lock requirements/verify.lock
  requirements/dev.lock requirements/demo.txt)
wanted=$(cat "${locks[@]}" | sha256sum)

if [[ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]]; then
  echo "Installing the test environment into $venv (first run only, a few minutes) ..."
  # Where PyTorch's own index is out of reach, pip would ask it five times.
  export PIP_RETRIES=${PIP_RETRIES:-1} PIP_DISABLE_PIP_VERSION_CHECK=1
  rm -rf "$venv"
  "$python" -m venv "$venv"
  # Torch by itself: its lock names PyTorch's index, and nothing else may come from there.
  for lock in "${locks[@]}"; do
    "$venv/bin/pip" install --quiet --no-deps --require-hashes -r "$lock"
  done
  echo "$wanted" > "$venv/installed"
fi
