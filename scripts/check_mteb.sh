#!/usr/bin/env bash
# Evaluates tasks of mteb from the disk by tools.evaluate, with mteb itself and without a hub: the
# figures are compared with those of mteb.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh .venv-mteb requirements/mteb.txt
packages=$(.venv-mteb/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
PYTHONPATH=$packages HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q -rs tests/tools/evaluate/test_mteb_task.py
