#!/usr/bin/env bash
# Runs the service with PyTorch for ARM on processors that QEMU emulates, and compares it with the
# references: what it computes there, not how fast.
#
#   scripts/check_arm.sh FOLDER     after ./run_tests.sh has made the test environment
#
# Runs as root on Debian with qemu-user and debootstrap. FOLDER keeps Debian's and Python's packages
# for ARM for the next run: 2 GB, or 6 where PyTorch's index of CPU builds is out of reach. It takes
# a quarter of an hour on two cores. SUITE and MIRROR are debootstrap's.
set -euo pipefail
folder=$(realpath --canonicalize-missing "${1:?usage: scripts/check_arm.sh FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$folder/root packages=$folder/packages checkout=$folder/checkout models=$folder/models

say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

# Debian's Python and C library. None of its own programs run here, so packages are only unpacked.
make_root() {
  local package
  rm -rf "$root"
  debootstrap --arch=arm64 --foreign --variant=minbase --include=python3 \
    "${SUITE:-bookworm}" "$root" ${MIRROR:+"$MIRROR"} > "$folder/debootstrap.log"
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  # What PyTorch's libraries ask Linux for about the processor: as of a Neoverse V1.
  for cpu in $(seq 0 $(($(nproc) - 1))); do
    local place=$root/sys/devices/system/cpu/cpu$cpu/regs/identification
    mkdir -p "$place"
    echo 0x00000000411fd401 > "$place/midr_el1"
  done
}

python_version() {
  basename "$(find "$root/usr/bin" -name 'python3.*' -type f | head -n 1)" | sed 's/python//'
}

install_for_arm() {
  local minor platforms=()
  for minor in {17..39}; do platforms+=(--platform "manylinux_2_${minor}_aarch64"); done
  .venv-tests/bin/pip install --quiet --no-deps --no-compile --only-binary=:all: \
    --platform manylinux2014_aarch64 "${platforms[@]}" --implementation cp \
    --python-version "$(python_version)" --target "$packages" --upgrade -r "$1"
}

copy_checkout() {
  rm -rf "$checkout"
  mkdir "$checkout"
  git ls-files -z --cached --others --exclude-standard \
    | tar --create --null --files-from=- | tar --extract --directory="$checkout"
  (cd "$checkout" && python3 -m smart_embedder.models.ops.build --machine aarch64)
}

make_models() {
  .venv-tests/bin/python - "$models" <<'PY'
import pathlib, sys
from tests.support.checkpoints import save_m3, save_qwen, save_reranker
folder = pathlib.Path(sys.argv[1])
save_m3(folder / "m3"), save_reranker(folder / "reranker"), save_qwen(folder / "qwen")
PY
}

# As `check FORMAT DENSE_MODEL PROCESSOR`.
check() {
  say "$3 in $1, with $2"
  export DTYPE=$1 DENSE_EMBEDDING_MODEL=$models/$2 DEVICE=cpu HF_HUB_OFFLINE=1
  # Nothing is measured at the start, which would take minutes.
  export EMBEDDING_MODEL=$models/m3 RERANKER_MODEL=$models/reranker MAX_BATCH_TOKENS=512
  (cd "$checkout" && PYTHONPATH=$packages:$checkout PYTHONDONTWRITEBYTECODE=1 \
    qemu-aarch64 -cpu "$3" -L "$root" "$root/usr/bin/python$(python_version)" \
    -m scripts.check_arm compute "$folder/results")
  .venv-tests/bin/python -m scripts.check_arm compare "$folder/results"
}

mkdir -p "$folder"
[[ -e $folder/root.done ]] || { say "Debian for ARM"; make_root; touch "$folder/root.done"; }
if [[ ! -e $folder/packages.done ]]; then
  say "Python's packages for ARM"
  install_for_arm requirements/service.lock
  install_for_arm requirements/torch-cpu.lock || install_for_arm requirements/torch-gpu.lock
  touch "$folder/packages.done"
fi
say "this checkout, its kernels for ARM, and small checkpoints"
copy_checkout
[[ -d $models ]] || make_models

# The first has bf16 and i8mm (without SVE, which PyTorch would use), the second dot products alone.
check bfloat16 m3 max,sve=off
check int8 m3 max,sve=off
check bfloat16 qwen max,sve=off
check float32 m3 neoverse-n1
check int8 m3 neoverse-n1
say "everything agrees"
