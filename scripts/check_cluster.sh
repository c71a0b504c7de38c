#!/usr/bin/env bash
# Runs the service and the job of docs/clusters.md on a real Ray cluster on this machine, of which it kills
# parts: scripts/check_cluster.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-cluster
scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh "$environment" requirements/cluster.txt
# What the service itself needs is there already.
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv-tests/bin/python -c "$packages" > "$("$environment/bin/python" -c "$packages")/service.pth"
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q tests/cluster "$@"
