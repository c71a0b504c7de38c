#!/usr/bin/env bash
# Builds the documentation as a site in build/site, and fails where a link or an anchor leads nowhere, a
# page is missing from the navigation, or something would be loaded from elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-docs
wanted=$(sha256sum < requirements/docs.lock)
if [[ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]]; then
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --require-hashes \
    -r requirements/docs.lock
  echo "$wanted" > "$venv/installed"
fi
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --clean 2>&1 | sed "/^INFO/d"
"$venv/bin/python" scripts/docs_site.py build/site
echo "The documentation is in build/site/index.html. To search it: python3 -m http.server -d build/site"
