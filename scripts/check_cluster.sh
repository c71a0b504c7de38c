#!/usr/bin/env bash
# Tests the job of docs/clusters.md and the example of Ray Serve on a real Ray cluster on this machine,
# parts of which are killed:
#   scripts/check_cluster.sh    any pytest arguments; all tests take about eight minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-cluster
scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh "$environment" requirements/cluster.txt
# Adds the packages of the tests' environment, which include those of the service.
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv-tests/bin/python -c "$packages" > "$("$environment/bin/python" -c "$packages")/service.pth"
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q -m cluster tests/deploy/ray "$@"
