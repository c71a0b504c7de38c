#!/usr/bin/env bash
# Writes a report of this engine on the machine's GPU, in under nine minutes: tests on the device,
# comparison with the references, kernels, speed beside FlagEmbedding, latency, HTTP, memory.
#   scripts/gpu_report.sh [--wheels FOLDER] [--out FOLDER] [--device cuda|cpu] [--only SECTIONS]
#     [--quick]
# It needs python3 with PyTorch, and no package index: with --wheels it installs the other packages
# from a folder, which `python -m benchmarks.gpu.wheels FOLDER` fills on a machine with an index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

wheels='' out=gpu-report arguments=()
while (($#)); do
  case $1 in
    --wheels) wheels=$2; shift ;;
    --out) out=$2; shift ;;
    --device) arguments+=(--device "$2"); shift ;;
    --only) arguments+=(--only "$2"); shift ;;
    --quick) arguments+=(--quick) ;;
    *) sed -n '2,7p' "$0" >&2; exit 1 ;;
  esac
  shift
done

if [[ -n $wheels ]]; then
  packages=$(mktemp -d)
  trap 'rm -rf "$packages"' EXIT
  python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$packages" "$wheels"/*.whl
  # These packages come before the machine's own, except PyTorch, which is not among the wheels.
  export PYTHONPATH="$PWD:$packages"
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -m benchmarks.gpu.report "$out" "${arguments[@]}"
