#!/usr/bin/env bash
# Linters, types, import layers and every test, in an environment of their own.
#   ./run_tests.sh                 everything
#   ./run_tests.sh --fast          within half a minute, before each commit: checks, and the tests that
#                                  start no process, reference or browser (tests/support/fast.py)
#   ./run_tests.sh --coverage      everything, and fails if the tests run fewer lines than before
#   ./run_tests.sh tests/smart_embedder    the checks, then only these tests (any pytest arguments)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fast='' coverage=()
[[ ${1:-} != --fast ]] || { fast=yes; shift; }
[[ ${1:-} != --coverage ]] || { coverage=(--cov --cov-report=term:skip-covered); shift; }
venv=.venv-tests
scripts/test_environment.sh "$venv"
# Without them, as where no index can be reached, the tests of the kernels are skipped.
[[ -n $fast ]] || "$venv/bin/python" -m smart_embedder.kernels.build || true
export PATH="$PWD/$venv/bin:$PATH"

# No test may reach for a model hub, and none may depend on the caller's settings.
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=true
# What a process has compiled, a hundred others read.
unset PYTHONDONTWRITEBYTECODE
# What takes long runs beside the tests, in the time that their processes wait for one another.
told=$(mktemp -d)
beside() { nice "${@:2}" > "$told/$1" 2>&1 & }
trap 'kill $(jobs -p) 2> /dev/null || true; rm -rf "$told"' EXIT
beside mypy mypy; mypy=$!
beside workflows scripts/check_workflows.sh; workflows=$!
echo "== ruff";        ruff check .; ruff format --check .
echo "== shellcheck";  shellcheck start_server.sh run_tests.sh .ci/run scripts/*.sh
echo "== import layers"; lint-imports --no-logo
echo "== prose";       python -m scripts.check_prose
missing_programs() {
  command -v promtool > /dev/null \
    || echo "prometheus is not installed: the tests of the dashboard and the alerts are skipped."
  [[ -x /usr/sbin/nginx ]] || command -v nginx > /dev/null \
    || echo "nginx is not installed: the tests of the proxy that the guide shows are skipped."
  docker compose version > /dev/null 2>&1 || docker-compose version > /dev/null 2>&1 \
    || echo "docker compose is not installed: the tests of what it makes of its files are skipped."
  command -v kubectl > /dev/null \
    || echo "kubectl is not installed: the tests of what kustomize makes of deploy/kubernetes are skipped."
  command -v helm > /dev/null || [[ -x .venv-manifests/bin/helm ]] \
    || echo "helm is not installed: the tests of the chart in deploy/helm are skipped."
  command -v qemu-aarch64 > /dev/null \
    || echo "qemu-user is not installed: the tests of the kernels for ARM are skipped."
  command -v chromium > /dev/null || command -v chromium-browser > /dev/null \
    || echo "chromium is not installed: the tests of the page at /ui are skipped."
  command -v wine > /dev/null || command -v wine64 > /dev/null || [[ -x /usr/lib/wine/wine64 ]] \
    || echo "wine is not installed: the tests that run start_server.bat are skipped."
}
if [[ -z $fast ]]; then
  missing_programs
  beside documentation scripts/build_docs.sh; documentation=$!
fi
# Four processes on two cores: most tests wait for a server's process a part of their time. A file
# stays in one of them, as does a folder whose files share servers (tests/conftest.py); chosen tests
# run in this one, where a debugger works. A crash ends the run, because pytest-xdist would wait
# forever for the rest of a file whose process was replaced.
processes=4
(($#)) && processes=0
[[ -z $fast ]] || { processes=2; set -- --fast "$@"; }
status=0
echo "== tests"
python -m pytest -q --durations=15 -rs -n "$processes" --dist loadfile --no-loadscope-reorder \
  --max-worker-restart=0 \
  "${coverage[@]}" "$@" || status=$?
outcome() { echo "== $1"; wait "$2" || status=$?; cat "$told/$1"; }
outcome mypy "$mypy"
outcome workflows "$workflows"
[[ -n $fast ]] || outcome documentation "$documentation"
exit "$status"
