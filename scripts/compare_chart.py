"""Compare the chart in deploy/helm with the overlays in deploy/kubernetes, object by object.

python scripts/compare_chart.py      needs helm and kubectl; check_manifests.sh installs helm
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

_ROOT = Path(__file__).resolve().parent.parent
CHART = _ROOT / "deploy" / "helm" / "smart-embedder"
OVERLAYS = _ROOT / "deploy" / "kubernetes"
# The only differences allowed: a change of the settings must replace the pods, for which kustomize
# ends the ConfigMap's name with a hash, and the chart annotates the pods with a checksum.
_HASHED_NAME = re.compile(r"\b(smart-embedder-settings)-[a-z0-9]{10}\b")
_CHECKSUM = "checksum/settings"
Objects = dict[str, dict[str, Any]]


def find_helm() -> str | None:
    """Return the helm of this machine, else the one that check_manifests.sh has installed."""
    installed = _ROOT / ".venv-manifests" / "bin" / "helm"
    return shutil.which("helm") or (str(installed) if installed.exists() else None)


def run_helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm; its standard output is the manifests or the report alone."""
    helm = find_helm()
    if helm is None:
        sys.exit("helm is not installed: scripts/check_manifests.sh --install")
    return subprocess.run([helm, *arguments], capture_output=True, text=True, check=False)


def render_overlay(folder: Path) -> Objects:
    """Return the objects that kustomize makes of a folder, by kind and name."""
    command: list[str | Path] = ["kubectl", "kustomize", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return _by_name(_HASHED_NAME.sub(r"\1", done.stdout))


def render_chart(values: Path) -> Objects:
    """Return the objects that helm makes of the chart with a file of values, by kind and name."""
    done = run_helm("template", "any-release", CHART, "--values", values)
    if done.returncode:
        sys.exit(done.stderr)
    objects = _by_name(done.stdout)
    template = objects["Deployment smart-embedder"]["spec"]["template"]["metadata"]
    del template["annotations"][_CHECKSUM]
    if not template["annotations"]:
        del template["annotations"]
    return objects


def _by_name(text: str) -> Objects:
    manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest is not None]
    objects = {f"{found['kind']} {found['metadata']['name']}": found for found in manifests}
    if len(objects) != len(manifests):
        sys.exit("two objects have the same kind and name")
    return objects


def list_differences(chart: Any, overlay: Any, path: str = "") -> list[str]:
    """Return a line for each field in which the two differ; an absent field is shown as None."""
    if isinstance(chart, dict) and isinstance(overlay, dict):
        return [
            line
            for key in sorted(chart.keys() | overlay.keys())
            for line in list_differences(chart.get(key), overlay.get(key), f"{path}/{key}")
        ]
    if isinstance(chart, list) and isinstance(overlay, list) and len(chart) == len(overlay):
        return [
            line
            for index, (ours, theirs) in enumerate(zip(chart, overlay, strict=True))
            for line in list_differences(ours, theirs, f"{path}/{index}")
        ]
    # Neither "8" nor True is the number.
    if type(chart) is type(overlay) and chart == overlay:
        return []
    return [f"{path}: the chart has {chart!r}, the overlay {overlay!r}"]


def main() -> None:
    """Print a line for each object of each overlay; the exit status is 1 if one differs."""
    differing = False
    for values in sorted((CHART / "examples").glob("*.yaml")):
        linted = run_helm("lint", "--strict", CHART, "--values", values)
        print(linted.stdout.strip())
        chart, overlay = render_chart(values), render_overlay(OVERLAYS / values.stem)
        differing |= linted.returncode != 0
        for name in sorted(chart.keys() | overlay.keys()):
            differences = list_differences(chart.get(name), overlay.get(name))
            print(f"{values.stem}: {name}: {'; '.join(differences) or 'equal'}")
            differing |= bool(differences)
    sys.exit(differing)


if __name__ == "__main__":
    main()
