#!/usr/bin/env bash
# Compares pooled vectors, MUVERA encodings and vectors of ColBERT models with those of PyLate and
# FastEmbed, in their own environment. Needs Python 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh .venv-references requirements/torch-cpu.lock requirements/references.txt
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q tests/oracle/test_references.py
