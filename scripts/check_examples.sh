#!/usr/bin/env bash
# Runs each file of examples/ in an environment that its own header's line makes, with the database
# that it names. requirements/examples.txt pins the versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/test_environment.sh .venv-tests
for example in examples/*.py; do
  environment=.venv-examples/$(basename "$example" .py)
  packages=$(sed -n 's/^pip install //p' "$example")
  wanted=$(cat - client/pyproject.toml requirements/examples.txt <<< "$packages" | sha256sum)
  [[ "$(cat "$environment/installed" 2> /dev/null)" != "$wanted" ]] || continue
  echo "pip install $packages"
  rm -rf "$environment"
  "${PYTHON:-python3}" -m venv "$environment"
  # Its quotes are those of the shell.
  xargs "$environment/bin/pip" install --quiet -c requirements/examples.txt <<< "$packages"
  echo "$wanted" > "$environment/installed"
done
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q tests/examples
