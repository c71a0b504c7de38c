#!/usr/bin/env bash
# Makes the environment of the tests, unless it is there: scripts/test_environment.sh FOLDER
set -euo pipefail

# Torch by itself: its lock names PyTorch's index, and nothing else may come from there.
PIP_REQUIRE_HASHES=1 exec "$(dirname "${BASH_SOURCE[0]}")/pinned_environment.sh" "$1" \
  requirements/{torch-cpu,service,verify,dev}.lock requirements/demo.txt requirements/test-model.txt
