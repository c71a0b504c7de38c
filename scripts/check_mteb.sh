#!/usr/bin/env bash
# Evaluates tasks of mteb from the disk by tools.evaluate, with mteb itself and without a hub: the
# figures are compared with those of mteb.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/test_environment.sh .venv-tests
folder=$PWD/build/mteb
wanted=$(sha256sum < requirements/mteb.txt)
if [[ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]]; then
  rm -rf "$folder"
  .venv-tests/bin/pip install --quiet --no-deps --target "$folder" -r requirements/mteb.txt
  echo "$wanted" > "$folder/installed"
fi
PYTHONPATH=$folder HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q -rs tests/tools/evaluate/test_mteb_task.py
