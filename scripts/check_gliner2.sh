#!/usr/bin/env bash
# Compares models of GLiNER2 with its package, installed in a folder of its own beside the packages
# of the tests, which are all that it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/test_environment.sh .venv-tests
.venv-tests/bin/pip install --quiet --no-deps --upgrade --target .venv-gliner2 -r requirements/gliner2.txt
PYTHONPATH=.venv-gliner2 HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q \
  tests/smart_embedder/models/extractors/test_gliner2.py tests/app/routers/test_extract_gliner2.py
