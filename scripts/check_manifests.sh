#!/usr/bin/env bash
# Checks the objects of deploy/kubernetes that are not Kubernetes' own, by schemas that packages carry:
# those of Prometheus Operator, KEDA and the Gateway API. Needs kubectl and npm; tests/deploy checks
# the others.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-manifests
scripts/pinned_environment.sh "$environment" requirements/manifests.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
package=@kubernetes-models/gateway-api@0.5.1
tar -xzf "$work/$(npm pack --silent --pack-destination "$work" "$package")" -C "$work"
for overlay in deploy/kubernetes/*/kustomization.yaml; do
  folder=$(dirname "$overlay")
  kubectl kustomize "$folder" > "$work/$(basename "$folder").yaml"
done
"$environment/bin/python" scripts/manifest_schemas.py "$work/package" "$work"/*.yaml
