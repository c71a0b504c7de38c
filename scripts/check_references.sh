#!/usr/bin/env bash
# Compares vectors of ColBERT models with those of PyLate, in an environment of its own, from which
# `python -m tests.oracle.references` also records pooled vectors and FastEmbed's MUVERA encodings.
# Needs Python 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh .venv-references requirements/torch-cpu.lock requirements/references.txt
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q tests/oracle/test_references.py
