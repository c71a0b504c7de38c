#!/usr/bin/env bash
# One report of this engine on a machine's GPU, in under nine minutes: tests on the device,
# comparison with the references, kernels, speed beside FlagEmbedding, latency, HTTP, memory.
#   scripts/gpu_report.sh [--wheels FOLDER] [--torch FOLDER] [--out FOLDER] [--device cuda|cpu]
#     [--only SECTIONS] [--quick]
# It needs python3 with PyTorch, and no package index: what else is missing comes from a folder of
# wheels, which `python -m benchmarks.gpu.wheels FOLDER` downloads on a machine with an index.
# Another PyTorch is compared with it where --torch has the wheels of that and of all it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wheels='' torch='' out=gpu-report arguments=()
while (($#)); do
  case $1 in
    --wheels) wheels=$2; shift ;;
    --torch) torch=$2; shift ;;
    --out) out=$2; shift ;;
    --device) arguments+=(--device "$2"); shift ;;
    --only) arguments+=(--only "$2"); shift ;;
    --quick) arguments+=(--quick) ;;
    *) sed -n '2,9p' "$0" >&2; exit 1 ;;
  esac
  shift
done

sites=$(mktemp -d)
trap 'rm -rf "$sites"' EXIT
install() {
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$sites/$1" "$2"/*.whl
}
if [[ -n $wheels ]]; then
  install service "$wheels"
  # Before what the machine has, but for PyTorch, which is not among the wheels.
  export PYTHONPATH="$PWD:$sites/service"
fi
if [[ -n $torch ]]; then
  install torch "$torch"
  arguments+=(--other-torch "$sites/torch")
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -m benchmarks.gpu.report "$out" "${arguments[@]}"
