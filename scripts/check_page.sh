#!/usr/bin/env bash
# Runs the tests of the page at /ui in headless Chromium.
#   scripts/check_page.sh              installs Debian's chromium if it is missing and you are root
#   scripts/check_page.sh --pictures   also writes the pictures in docs/ again, in the font Inter if installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ "${1:-}" == "--pictures" ]] && export WRITE_PICTURES=1
scripts/test_environment.sh .venv-tests
if ! command -v chromium > /dev/null && ! command -v chromium-browser > /dev/null; then
  if [[ $EUID -ne 0 ]] || ! command -v apt-get > /dev/null; then
    echo "chromium is not installed: install it, as with apt-get install chromium"
    exit 1
  fi
  apt-get update -q
  apt-get install -yq --no-install-recommends chromium fonts-inter
fi
HF_HUB_OFFLINE=1 .venv-tests/bin/python -m pytest -q -rs tests/app/ui tests/app/routers/test_pages.py
