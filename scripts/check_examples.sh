#!/usr/bin/env bash
# Runs each file of examples/ with its database, in an environment with the packages of its line `pip
# install`. requirements/examples.txt pins the versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/test_environment.sh .venv-tests
for example in examples/*.py; do
  environment=.venv-examples/$(basename "$example" .py)
  packages=$(sed -n 's/^pip install //p' "$example")
  digest=$(cat - client/pyproject.toml requirements/examples.txt <<< "$packages" | sha256sum)
  [[ "$(cat "$environment/installed" 2> /dev/null)" != "$digest" ]] || continue
  echo "pip install $packages"
  rm -rf "$environment"
  "${PYTHON:-python3}" -m venv "$environment"
  # xargs removes the quotes of the line.
  xargs "$environment/bin/pip" install --quiet -c requirements/examples.txt <<< "$packages"
  echo "$digest" > "$environment/installed"
done
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q tests/examples
