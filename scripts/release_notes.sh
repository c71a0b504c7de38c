#!/usr/bin/env bash
# Prints the section of CHANGELOG.md about a version: scripts/release_notes.sh 2.0.0
# It fails where there is none, or where its heading has no date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

heading=$(grep -nE "^## ${1//./\\.} \([0-9]{4}-[0-9]{2}-[0-9]{2}\)$" CHANGELOG.md) || {
  echo "CHANGELOG.md has no section '## $1 (YYYY-MM-DD)'" >&2
  exit 1
}
tail -n "+$((${heading%%:*} + 1))" CHANGELOG.md | awk '/^## [0-9]/ { exit } { print }'
