#!/usr/bin/env bash
# Creates an environment from files with all packages and their versions, unless it is up to date:
#   scripts/pinned_environment.sh FOLDER FILE...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=$1
shift
digest=$(cat "$@" | sha256sum)
if [[ "$(cat "$environment/installed" 2>/dev/null)" != "$digest" ]]; then
  echo "Installing $* into $environment (a few minutes) ..."
  # By default pip tries an index that cannot be reached, such as PyTorch's, five times.
  export PIP_RETRIES=${PIP_RETRIES:-1} PIP_DISABLE_PIP_VERSION_CHECK=1
  rm -rf "$environment"
  "${PYTHON:-python3}" -m venv "$environment"
  for file in "$@"; do
    "$environment/bin/pip" install --quiet --no-deps -r "$file"
  done
  echo "$digest" > "$environment/installed"
fi
