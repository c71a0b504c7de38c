#!/usr/bin/env bash
# Makes an environment of files that name every package and its version, unless it is there:
#   scripts/pinned_environment.sh FOLDER FILE...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=$1
shift
wanted=$(cat "$@" | sha256sum)
if [[ "$(cat "$environment/installed" 2>/dev/null)" != "$wanted" ]]; then
  echo "Installing $* into $environment (a few minutes) ..."
  # Where PyTorch's own index is out of reach, pip would ask it five times.
  export PIP_RETRIES=${PIP_RETRIES:-1} PIP_DISABLE_PIP_VERSION_CHECK=1
  rm -rf "$environment"
  "${PYTHON:-python3}" -m venv "$environment"
  for file in "$@"; do
    "$environment/bin/pip" install --quiet --no-deps -r "$file"
  done
  echo "$wanted" > "$environment/installed"
fi
