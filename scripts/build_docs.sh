#!/usr/bin/env bash
# Builds the documentation as a site in build/site. Fails if a link or an anchor is broken, a page is
# missing from the navigation, or a page would load something from another server.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-docs
scripts/pinned_environment.sh "$venv" requirements/docs.lock
NO_MKDOCS_2_WARNING=1 "$venv/bin/mkdocs" build --strict --clean 2>&1 | sed "/^INFO/d"
"$venv/bin/python" scripts/docs_site.py build/site
echo "The documentation is in build/site/index.html. To search it: python3 -m http.server -d build/site"
