#!/usr/bin/env bash
# Reads a task of mteb from the disk as tools.evaluate does, with mteb itself and without a hub.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/test_environment.sh .venv-tests
folder=build/mteb
wanted=$(sha256sum < requirements-mteb.txt)
if [[ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]]; then
  rm -rf "$folder"
  .venv-tests/bin/pip install --quiet --no-deps --target "$folder" -r requirements-mteb.txt
  echo "$wanted" > "$folder/installed"
fi
PYTHONPATH=$folder HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q -rs tests/tools/evaluate/test_mteb_task.py
