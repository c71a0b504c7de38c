#!/usr/bin/env bash
# Starts Smart Embedder in a virtual environment of its own (local) or in a container (docker).
# Only finds a Python and hands over to launcher/, which start_server.bat shares.
# Written for bash 3.2 and later, so that it also runs on macOS as it comes.
set -euo pipefail
shopt -s nocasematch

fail() {
  printf 'start_server: %s\n' "$*" >&2
  exit 1
}

python_works() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    python_works "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or newer."
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3.13 python3.12 python3.11 python3 python .venv/bin/python; do
    if python_works "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
}

# With no Python nothing is asked and nothing tuned: the container starts as .env describes it.
start_container() {
  local file=docker-compose.cpu.yml
  [[ $* =~ ^(docker)?\ ?(cpu|gpu|auto)?$ ]] ||
    fail "Python 3.11 or newer was not found: install it, or name one with PYTHON=/path/to/python."
  command -v docker >/dev/null ||
    fail "neither Python 3.11 or newer nor docker was found: install one of them."
  docker compose version >/dev/null 2>&1 ||
    fail "'docker compose' was not found: install Docker's compose plugin, 2.24.4 or newer."
  docker info >/dev/null 2>&1 ||
    fail "the Docker daemon does not answer, or you may not use it: 'docker info' says why."
  if [[ $* == *gpu ]] || { [[ $* != *cpu ]] && nvidia-smi >/dev/null 2>&1; }; then
    file=docker-compose.gpu.yml
  fi
  docker compose -f "$file" up --build -d ||
    fail "docker compose could not start the service; its message above says why."
  echo "Smart Embedder is starting. Logs: docker compose -f \"$PWD/$file\" logs -f"
}

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
python=$(find_python)
if [[ -z $python ]]; then
  start_container "$@"
else
  exec "$python" -m launcher "$@"
fi
