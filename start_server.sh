#!/usr/bin/env bash
# Starts Smart Embedder in a container (docker), or in a virtual environment (local). For the latter it
# only finds a Python, and launcher/ does the rest.
# Runs with bash 3.2 and later, which macOS has.
set -euo pipefail
shopt -s nocasematch

fail() {
  printf 'start_server: %s\n' "$*" >&2
  exit 1
}

python_works() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

start_local() {
  local candidate
  # The server would import packages of another environment from these before its own.
  unset PYTHONPATH PYTHONHOME PYTHONSAFEPATH
  if [[ -n ${PYTHON:-} ]]; then
    python_works "$PYTHON" || fail "PYTHON=$PYTHON is not a working Python 3.11 or newer."
    exec "$PYTHON" -m launcher "$@"
  fi
  for candidate in python3.13 python3.12 python3.11 python3 python .venv/bin/python; do
    if python_works "$candidate"; then exec "$candidate" -m launcher "$@"; fi
  done
  fail "Python 3.11 or newer was not found: install it, or name one with PYTHON=/path/to/python."
}

# Prints a value that compose passes to the service, from the environment or .env, if it is set.
value_of() {
  local pattern="[[:space:]]$1: \"?([^\"[:space:]]+)"
  if [[ $config =~ $pattern && ${BASH_REMATCH[1]} != null ]]; then
    printf '%s' "${BASH_REMATCH[1]}"
  fi
}

# Sets a variable for compose, and prints it.
choose() {
  export "$1=$2"
  echo "Set for this start: $1=$2."
}

# Asks for a model that is not set, as launcher/console.py does; no answer means BGE.
ask_model() {
  local variable=$1 subject=$2 text=$3 bge=$4 qwen=$5 answer
  [[ -z $(value_of "$variable") ]] || return 0
  printf '%s\n' "$(<"launcher/$text")"
  while :; do
    printf '%s, BGE or QWEN [BGE]: ' "$subject"
    read -r answer || answer=BGE
    case ${answer:-BGE} in
      bge) [[ -z $bge ]] || export "$variable=$bge"; return 0 ;;
      qwen) export "$variable=$qwen"; return 0 ;;
      *) echo "That is neither BGE nor QWEN." ;;
    esac
  done
}

# Sets the limits of a Qwen reranker as launcher/gpu.py does, by the memory of the smallest GPU in MiB.
tune_reranker() {
  local memory smallest='' batch=16 length=8192
  if [[ $1 == *cpu* ]]; then
    batch=1 length=2048
  else
    while read -r memory; do
      [[ $memory =~ ^[0-9]+$ ]] || continue
      if [[ -z $smallest ]] || ((memory < smallest)); then smallest=$memory; fi
    done < <(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null)
    [[ -n $smallest ]] || return 0
    if ((smallest <= 6144)); then batch=4 length=4096; elif ((smallest <= 8192)); then batch=8; fi
  fi
  [[ -n $(value_of QWEN_RERANK_BATCH_SIZE) ]] || choose QWEN_RERANK_BATCH_SIZE "$batch"
  [[ -n $(value_of QWEN_RERANK_MAX_LENGTH) ]] || choose QWEN_RERANK_MAX_LENGTH "$length"
}

# Fails if Docker cannot be used; sets `daemon` to the output of `docker info`.
require_docker() {
  local version number='^v?([0-9]+)\.([0-9]+)\.([0-9]+)'
  command -v docker >/dev/null ||
    fail "docker was not found: install Docker, or use 'start_server.sh local'."
  version=$(docker compose version --short 2>/dev/null) ||
    fail "'docker compose' was not found: install Docker's compose plugin, 2.24.4 or newer."
  if [[ $version =~ $number ]] &&
    ((BASH_REMATCH[1] * 1000000 + BASH_REMATCH[2] * 1000 + BASH_REMATCH[3] < 2024004)); then
    fail "docker compose ${version#v} is too old: install 2.24.4 or newer."
  fi
  daemon=$(docker info --format '{{json .}}' 2>/dev/null) ||
    fail "the Docker daemon does not answer, or you may not use it: 'docker info' says why."
}

# Fails, before the build of some minutes, if the container could not start.
require_container() {
  local file=$1 port
  port=$(value_of published)
  if [[ $daemon == *"\"Name\":\"$HOSTNAME\""* ]]; then # The daemon is on this machine.
    if [[ $file == *gpu* && $daemon != *nvidia* ]] &&
      ! command -v nvidia-container-runtime-hook nvidia-ctk >/dev/null; then
      fail "docker gpu needs the NVIDIA Container Toolkit, and Docker does not have it: install" \
        "nvidia-container-toolkit and restart Docker, or use 'start_server.sh docker cpu'."
    fi
  elif [[ $daemon != *'"Name":"docker-desktop"'* ]]; then
    return 0
  fi
  # If our container has the port, compose replaces it.
  if [[ $(docker compose -f "$file" port embedder 8000 2>/dev/null) != *":$port" ]] &&
    (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    fail "port $port of 127.0.0.1 is in use: stop the program there, or set another PORT."
  fi
}

start_container() {
  local flavour=$1 daemon config file device address
  require_docker
  # The file for GPUs is the one that passes DEVICE on.
  config=$(docker compose -f docker-compose.gpu.yml config) ||
    fail "docker compose cannot read its files or .env; its message above says why."
  config=${config#*environment:}
  device=$(value_of DEVICE)
  file=docker-compose.cpu.yml
  if [[ $flavour == gpu || $flavour == auto && $device == cuda* ]] ||
    { [[ $flavour == auto && $device == auto ]] && nvidia-smi >/dev/null 2>&1; }; then
    file=docker-compose.gpu.yml
  fi
  require_container "$file"
  if [[ -t 0 && -t 1 ]]; then
    ask_model DENSE_EMBEDDING_MODEL "Dense model" dense.txt "" Qwen/Qwen3-Embedding-0.6B
    ask_model RERANKER_MODEL Reranker reranker.txt BAAI/bge-reranker-v2-m3 Qwen/Qwen3-Reranker-0.6B
  fi
  [[ $flavour != gpu || $device == cuda* ]] || choose DEVICE cuda
  [[ ${RERANKER_MODEL:-$(value_of RERANKER_MODEL)} != *qwen* ]] || tune_reranker "$file"
  docker compose -f "$file" up --build -d ||
    fail "docker compose could not start the service; its message above says why."
  address=$(docker compose -f "$file" port embedder 8000) || address=127.0.0.1:$(value_of published)
  echo "Smart Embedder is starting; it is ready when http://$address/health says \"healthy\"."
  echo "Logs: docker compose -f \"$PWD/$file\" logs -f"
}

CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
if [[ $* =~ ^(docker )?(cpu|gpu|auto)$ || $* =~ ^(docker)?$ ]]; then
  start_container "${BASH_REMATCH[2]:-auto}"
else
  start_local "$@"
fi
