#!/usr/bin/env bash
# Runs the tests of the kernels with AddressSanitizer and UndefinedBehaviorSanitizer, and fuzzes the
# parsers of requests and model files with coverage feedback. Stops at the first report.
#
#   scripts/check_sanitizers.sh [--seconds N] [FOLDER]
#
# Needs g++ for its AddressSanitizer, and qemu-user for the ARM kernels. The kernels take five minutes
# on two cores, the fuzzing N seconds in all, an hour by default. FOLDER, by default build/fuzzing,
# keeps the inputs for the next run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds=3600
if [[ "${1:-}" == --seconds ]]; then seconds=$2; shift 2; fi
folder=$(realpath --canonicalize-missing "${1:-build/fuzzing}")
mkdir -p "$folder"
scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh .venv-fuzz requirements/fuzz.txt
export PATH="$PWD/.venv-tests/bin:$PATH" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
say() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

# In a copy of the checkout, so that no service can load the library.
checkout=$(mktemp --directory)
trap 'rm -rf "$checkout"' EXIT
git ls-files -z --cached --others --exclude-standard \
  | tar --create --null --files-from=- | tar --extract --directory="$checkout"

# Leaks are not detected, because the interpreter leaks objects of its start. libstdc++ is loaded
# first, because AddressSanitizer looks up its exceptions before PyTorch loads it.
with_sanitizers() {
  env LD_PRELOAD="$(g++ -print-file-name=libasan.so):$(g++ -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=1 PYTHONMALLOC=malloc \
    CUDA_KERNEL_CHECKS="-g -fsanitize=address,undefined -fno-sanitize-recover=all" "$@"
}

say "the kernels, with checks"
(cd "$checkout" && python - <<'PY'
from pathlib import Path
from tempfile import TemporaryDirectory
from smart_embedder.kernels.build import Compiler, make_library
from smart_embedder.kernels.build import current_architecture

# The compiler's driver would drop AddressSanitizer, because it has no library for it.
checks = ("-Xclang", "-fsanitize=address", "-fsanitize=undefined,float-cast-overflow")
with TemporaryDirectory() as temporary:
    folder = Path(temporary)
    compiler = Compiler(folder / "compiler", folder, current_architecture(), checks)
    compiler.fetch()
    make_library(compiler)
PY
)

say "wrong calls are reported"
for fault in address undefined; do
  if (cd "$checkout" && with_sanitizers python -m tests.support.kernel_faults "$fault" 2> "$folder/fault.log"); then
    echo "no sanitizer has reported a wrong call of a kernel ($fault)" >&2
    exit 1
  fi
  grep --max-count=1 --extended-regexp 'ERROR: AddressSanitizer|panic:' "$folder/fault.log"
done

say "the tests of the kernels, and of those for CUDA on a CPU"
(cd "$checkout" && with_sanitizers python -m pytest -q -rs tests/smart_embedder/kernels tests/smart_embedder/models/families/test_int8*.py \
  --deselect tests/smart_embedder/kernels/test_build.py --ignore tests/smart_embedder/kernels/test_native_on_arm.py)

say "the kernels for ARM on an emulated processor"
(cd "$checkout" && ARM_KERNEL_CHECKS="-fsanitize=undefined -fsanitize-trap=undefined" \
  python -m pytest -q -rs tests/smart_embedder/kernels/test_native_on_arm.py)

say "the parsers"
atheris=$(.venv-fuzz/bin/python -c 'import atheris, pathlib; print(pathlib.Path(atheris.__file__).parents[1])')
PYTHONPATH=$atheris:client/src python -m tests.fuzzing.campaign "$folder" --seconds "$seconds"
say "no report"
