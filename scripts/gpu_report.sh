#!/usr/bin/env bash
# One report of this engine on a machine's GPU, in under nine minutes: tests on the device,
# comparison with the references, kernels, speed beside FlagEmbedding, latency, HTTP, memory.
#   scripts/gpu_report.sh [--wheels FOLDER] [--out FOLDER] [--device cuda|cpu] [--quick]
#   scripts/gpu_report.sh --collect FOLDER [PYTHON_VERSION [PACKAGE ...]]
# The first needs python3 with PyTorch, and no package index: what else is missing comes from the
# folder of wheels. The second, on a machine with an index, downloads them: those of the lock files
# without PyTorch, or only the packages that are named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

collect() {
  local folder=$1 version=${2:-3.12}
  shift; shift || true
  local platforms=() glibc names
  for glibc in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  names=$(cat requirements.lock requirements-dev.lock \
    | sed -n 's/^\([A-Za-z0-9._-]*\(\[[a-z,]*\]\)\{0,1\}==[^ ;]*\).*/\1/p' | sort -u)
  if (($#)); then
    names=$(printf '%s\n' "$@" | while read -r name; do grep -i "^$name\(\[.*\)\{0,1\}==" <<< "$names"; done)
  fi
  mkdir -p "$folder"
  local name
  for name in $names; do
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
      --implementation cp "${platforms[@]}" --dest "$folder" "$name" \
      || echo "no wheel of $name for Python $version"
  done
  du -sh "$folder"
}

wheels='' out=gpu-report arguments=()
while (($#)); do
  case $1 in
    --collect) shift; collect "$@"; exit ;;
    --wheels) wheels=$2; shift ;;
    --out) out=$2; shift ;;
    --device) arguments+=(--device "$2"); shift ;;
    --quick) arguments+=(--quick) ;;
    *) sed -n '2,10p' "$0" >&2; exit 1 ;;
  esac
  shift
done

if [[ -n $wheels ]]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
  # Behind what the machine has: its PyTorch and what fits it come first.
  export PYTHONPATH="$PWD:$site"
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -m benchmarks.gpu.report "$out" "${arguments[@]}"
