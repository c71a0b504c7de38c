#!/usr/bin/env bash
# Runs the service and the job of docs/clusters.md on a real Ray cluster on this machine, and kills
# parts of it:
#   scripts/check_cluster.sh            all tests, in about seven minutes
#   scripts/check_cluster.sh --install  only makes the environment, with which run_tests.sh runs the
#                                       part of them that takes a minute
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-cluster
scripts/test_environment.sh .venv-tests
scripts/pinned_environment.sh "$environment" requirements/cluster.txt
# The environment of the tests has the packages of the service.
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv-tests/bin/python -c "$packages" > "$("$environment/bin/python" -c "$packages")/service.pth"
[[ ${1:-} != --install ]] || exit 0
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q -m "" tests/deploy/ray "$@"
