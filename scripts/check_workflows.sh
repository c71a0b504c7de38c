#!/usr/bin/env bash
# Checks the workflows, the forms for issues and Renovate's configuration against their schemas, and the workflows for
# what an attacker could use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.github"

check-jsonschema --builtin-schema vendor.github-workflows workflows/*.yml
check-jsonschema --builtin-schema vendor.github-issue-forms ISSUE_TEMPLATE/*.yml
check-jsonschema --builtin-schema vendor.renovate renovate.json
zizmor --offline --quiet --min-severity medium .
