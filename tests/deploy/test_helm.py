"""The output of helm for the chart in deploy/helm, compared with that of kustomize."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from app.settings import Settings
from scripts.compare_chart import (
    CHART,
    OVERLAYS,
    find_helm,
    list_differences,
    render_chart,
    render_overlay,
    run_helm,
)
from smart_embedder import __version__
from smart_embedder.settings import LIBRARY_VARIABLES, choices
from tests.support.env_example import listed_settings

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
IMAGE = {"repository": "smart-embedder", "tag": "latest"}
# The chart has values for them, or they are secrets.
NOT_IN_SETTINGS = {
    *("HOST", "PORT", "HF_HOME", "DEVICE", "DTYPE", "HF_ENDPOINT"),
    *("API_TOKEN", "API_TOKENS_FILE", "HF_TOKEN"),
}

# Each renders manifests by helm: left out by --fast, as those that start processes.
pytestmark = pytest.mark.long
needs_helm = pytest.mark.skipif(
    find_helm() is None, reason="helm is not installed: scripts/check_manifests.sh --install"
)
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not installed"
)


def read_schema() -> dict[str, Any]:
    return json.loads((CHART / "values.schema.json").read_text())["properties"]


@pytest.fixture
def write_values(tmp_path: Path):
    """Write a file of values with an image, and return its path."""

    def write(**values: Any) -> Path:
        path = tmp_path / "values.yaml"
        path.write_text(json.dumps({"image": IMAGE} | values))
        return path

    return write


@needs_helm
@needs_kubectl
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_chart_renders_the_objects_of_the_overlay(example: Path) -> None:
    linted = run_helm("lint", "--strict", CHART, "--values", example)
    assert linted.returncode == 0, linted.stdout
    overlay = render_overlay(OVERLAYS / example.stem)
    assert list_differences(render_chart(example), overlay) == []


@needs_helm
@needs_kubectl
def test_chart_has_the_components_that_no_overlay_has(write_values, tmp_path: Path) -> None:
    components = ["models-in-image", "local-models", "ipv6"]
    folder = tmp_path / "overlay"
    folder.mkdir()
    above = Path(os.path.relpath(OVERLAYS, folder))
    overlay = {
        "resources": [str(above / "base")],
        "components": [str(above / "components" / component) for component in components],
        "images": [{"name": "smart-embedder", "newTag": IMAGE["tag"]}],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(overlay))
    values = write_values(cache={"type": "image"}, localModels="smart-embedder-models", ipv6=True)
    assert list_differences(render_chart(values), render_overlay(folder)) == []


def test_every_overlay_has_an_example_and_every_component_is_compared() -> None:
    overlays = {file.parent.name for file in OVERLAYS.glob("*/kustomization.yaml")} - {"base"}
    assert {example.stem for example in EXAMPLES} == overlays
    named = {"models-in-image", "local-models", "ipv6"}
    for overlay in overlays:
        kustomization = yaml.safe_load((OVERLAYS / overlay / "kustomization.yaml").read_text())
        named |= {Path(path).name for path in kustomization.get("components", [])}
    assert named == {folder.name for folder in (OVERLAYS / "components").iterdir()}


def test_a_difference_is_named_by_its_field() -> None:
    chart = {"spec": {"ports": [{"port": 8000}], "replicas": 2}}
    overlay = {"spec": {"ports": [{"port": "8000"}], "replicas": 2, "paused": True}}
    assert list_differences(chart, overlay) == [
        "/spec/paused: the chart has None, the overlay True",
        "/spec/ports/0/port: the chart has 8000, the overlay '8000'",
    ]
    assert list_differences([1], [1, 2]) == [": the chart has [1], the overlay [1, 2]"]


@needs_helm
def test_values_beyond_the_overlays_reach_their_objects(write_values) -> None:
    values = write_values(
        image={"repository": "registry.example.com/smart-embedder"},
        gpu={"enabled": True, "runtimeClass": "nvidia"},
        settings={
            "MAX_BODY_BYTES": 16777216,
            "UI": False,
            "QUERY_PROMPT": 'say "why": ',
            "SHUTDOWN_DELAY": 2.5,
        },
        dtype="bfloat16",
        resources={"cpu": 6, "memory": "24Gi"},
        nodeSelector={"pool": "gpu"},
        cache={"type": "shared", "size": "50Gi", "storageClass": "nfs"},
        secrets={"tokens": "t", "hub": "h", "metrics": "m", "imagePull": "p"},
        monitoring={"enabled": True},
    )
    objects = render_chart(values)
    settings = objects["ConfigMap smart-embedder-settings"]["data"]
    assert (settings["MAX_BODY_BYTES"], settings["UI"]) == ("16777216", "false")
    assert (settings["QUERY_PROMPT"], settings["DTYPE"]) == ('say "why": ', "bfloat16")
    pod = objects["Deployment smart-embedder"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"registry.example.com/smart-embedder:{__version__}-gpu"
    assert container["resources"] == {
        "requests": {"cpu": "6", "memory": "24Gi"},
        "limits": {"memory": "24Gi", "nvidia.com/gpu": "1"},
    }
    # 2.5, twice 30, and the margin.
    assert pod["terminationGracePeriodSeconds"] == 68
    assert pod["runtimeClassName"] == "nvidia"
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["imagePullSecrets"] == [{"name": "p"}]
    assert {"name": "tokens", "secret": {"secretName": "t", "defaultMode": 0o440}} in pod["volumes"]
    claim = objects["PersistentVolumeClaim smart-embedder-model-cache"]["spec"]
    assert claim["storageClassName"] == "nfs"
    assert claim["resources"] == {"requests": {"storage": "50Gi"}}
    (endpoint,) = objects["PodMonitor smart-embedder"]["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "m", "key": "token"}}
    for manifest in objects.values():
        if manifest["kind"] not in {"PodMonitor", "PrometheusRule"}:
            kubernetes_validate.validate(manifest, "1.30", strict=True)


@needs_helm
@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"replica": 3}, r"replica\b.*not allowed"),
        ({"replicas": "3"}, "replicas"),
        ({"image": {}}, "image.repository"),
        ({"settings": {"EMBEDING_MODEL": "a"}}, "settings.*EMBEDING_MODEL.*not allowed"),
        ({"settings": {"API_TOKEN": "a"}}, "settings.*API_TOKEN.*not allowed"),
        ({"cache": {"size": "20GB"}}, "cache.size"),
        ({"hub": {"endpoint": "https://hub.example.org:8443"}}, "hub.endpoint"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"cache": {"type": "image"}, "hub": {"addresses": ["10.0.0.0/8"]}}, "hub.addresses"),
    ],
)
def test_wrong_value_is_refused(values, refusal: str, write_values) -> None:
    done = run_helm("template", "any-release", CHART, "--values", write_values(**values))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(refusal, done.stderr)


@needs_helm
def test_checkout_without_symbolic_links_is_refused(write_values, tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "smart-embedder")
    values = write_values(monitoring={"enabled": True})
    assert run_helm("template", "any-release", chart, "--values", values).returncode == 0
    for link in (CHART / "files").iterdir():
        (chart / "files" / link.name).write_text(str(link.readlink()))
    done = run_helm("template", "any-release", chart, "--values", values)
    assert (done.returncode, done.stdout) == (1, "")
    assert "files/ has no symbolic links" in done.stderr


def test_schema_knows_the_settings_and_number_formats_of_the_service() -> None:
    schema = read_schema()
    assert (
        schema["settings"]["properties"].keys()
        == (listed_settings().keys() | LIBRARY_VARIABLES) - NOT_IN_SETTINGS
    )
    assert schema["dtype"]["enum"] == ["", *choices(Settings.model_fields["dtype"])]


def test_chart_has_the_version_of_the_service() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
