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

# The value of a variable, as the environment or .env sets it.
value_of() {
  local line value=${!1:-} assignment="^[[:space:]]*(export[[:space:]]+)?$1[[:space:]]*=[[:space:]]*(.*)\$"
  if [[ -z $value && -f .env ]]; then
    while IFS= read -r line || [[ -n $line ]]; do
      if [[ $line =~ $assignment ]]; then value=${BASH_REMATCH[2]%%#*}; fi
    done < .env
  fi
  printf '%s' "${value//[[:space:]]/}"
}

# Asks for a model that is not set, in the words of launcher/console.py; for no answer it is BGE.
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

# Sets what launcher/gpu.py sets for a Qwen reranker, by the memory of the smallest GPU in MiB.
tune_reranker() {
  local memory smallest='' batch=16 length=8192 chosen=''
  [[ $(value_of RERANKER_MODEL) == *qwen* ]] || return 0
  if [[ $1 == cpu ]]; then
    batch=1 length=2048
  else
    while read -r memory; do
      [[ $memory =~ ^[0-9]+$ ]] || continue
      if [[ -z $smallest ]] || ((memory < smallest)); then smallest=$memory; fi
    done < <(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null)
    [[ -n $smallest ]] || return 0
    if ((smallest <= 6144)); then batch=4 length=4096; elif ((smallest <= 8192)); then batch=8; fi
  fi
  if [[ -z $(value_of QWEN_RERANK_BATCH_SIZE) ]]; then
    export QWEN_RERANK_BATCH_SIZE=$batch
    chosen="QWEN_RERANK_BATCH_SIZE=$batch"
  fi
  if [[ -z $(value_of QWEN_RERANK_MAX_LENGTH) ]]; then
    export QWEN_RERANK_MAX_LENGTH=$length
    chosen="${chosen:+$chosen, }QWEN_RERANK_MAX_LENGTH=$length"
  fi
  [[ -z $chosen ]] || echo "Set for this start: $chosen."
}

# What launcher/docker.py does, where there is no Python.
start_container() {
  local file=docker-compose.cpu.yml flavour memory threads
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
  if [[ -t 0 && -t 1 ]]; then
    ask_model DENSE_EMBEDDING_MODEL "Dense model" dense.txt "" Qwen/Qwen3-Embedding-0.6B
    ask_model RERANKER_MODEL Reranker reranker.txt BAAI/bge-reranker-v2-m3 Qwen/Qwen3-Reranker-0.6B
  fi
  flavour=${file#docker-compose.}
  tune_reranker "${flavour%.yml}"
  memory=$(value_of MEMORY_LIMIT) threads=$(value_of PIDS_LIMIT)
  echo "Limits of the container: MEMORY_LIMIT=${memory:-16g}, PIDS_LIMIT=${threads:-2048}."
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
