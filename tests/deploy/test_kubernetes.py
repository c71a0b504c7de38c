"""The output of kustomize for deploy/kubernetes, checked by published schemas and the code."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from app.settings import Settings
from smart_embedder import __version__, core
from smart_embedder.settings import LIBRARY_VARIABLES
from tests.support.env_example import listed_settings
from tests.support.server import RunningServer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("cpu", "gpu")
# The oldest version in which preStop `sleep` needs no feature gate, and the newest with a schema.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
NAME = {"app.kubernetes.io/name": "smart-embedder"}

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def objects(overlay: str) -> dict[str, dict[str, Any]]:
    """The objects by kind, of which there is one each."""
    return build_objects(FOLDER / overlay)


def build_objects(folder: Path) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    manifests = list(yaml.safe_load_all(done.stdout))
    kinds = {manifest["kind"]: manifest for manifest in manifests}
    assert len(kinds) == len(manifests)
    return kinds


@pytest.fixture(scope="module")
def pod(objects) -> dict[str, Any]:
    return objects["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


def read_settings(objects, container) -> dict[str, str]:
    """Return the environment variables of the process."""
    (source,) = container["envFrom"]
    assert source["configMapRef"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    variables = {
        variable["name"]: variable["value"] for variable in container["env"] if "value" in variable
    }
    assert not variables.keys() & objects["ConfigMap"]["data"].keys()
    return objects["ConfigMap"]["data"] | variables


def test_objects_are_valid_by_the_published_schemas(objects) -> None:
    assert set(objects) == {
        *("ServiceAccount", "ConfigMap", "Service", "PersistentVolumeClaim", "Deployment"),
        *("PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler"),
    }
    misspelt = objects["Service"] | {"spec": {"portz": []}}
    for version in VERSIONS:
        for manifest in objects.values():
            kubernetes_validate.validate(manifest, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(misspelt, version, strict=True)


def test_local_models_volume_is_mounted_read_only(tmp_path: Path, overlay: str) -> None:
    shutil.copytree(FOLDER, tmp_path / "kubernetes")
    file = tmp_path / "kubernetes" / overlay / "kustomization.yaml"
    file.write_text(f"{file.read_text()}components: [../local-models]\n")
    manifests = build_objects(file.parent)
    kubernetes_validate.validate(manifests["Deployment"], VERSIONS[0], strict=True)
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "models")
    assert volume["persistentVolumeClaim"]["readOnly"]
    (only,) = pod["containers"]
    (mount,) = (mount for mount in only["volumeMounts"] if mount["name"] == "models")
    assert (mount["mountPath"], mount["readOnly"]) == ("/models", True)
    # The mounts of every overlay are kept.
    assert "/app/model_cache" in {mount["mountPath"] for mount in only["volumeMounts"]}


def test_selectors_and_references_match(objects, pod) -> None:
    deployment = objects["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == NAME
    assert objects["Service"]["spec"]["selector"] == NAME
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == NAME
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == NAME
    scaled = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert "replicas" not in deployment["spec"]
    assert pod["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]
    (claim,) = (volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume)
    name = objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert claim["persistentVolumeClaim"]["claimName"] == name


def test_settings_are_valid(objects, container, overlay: str) -> None:
    given = read_settings(objects, container)
    assert given.keys() <= listed_settings().keys() | LIBRARY_VARIABLES
    values = {name.lower(): value for name, value in given.items() if name not in LIBRARY_VARIABLES}
    settings = Settings.model_validate(values)
    assert settings.device == {"cpu": "cpu", "gpu": "cuda"}[overlay]


def test_ports_and_paths_match_the_image(objects, container, pod, overlay: str) -> None:
    image = (ROOT / f"Dockerfile.{overlay}").read_text()
    given = read_settings(objects, container)
    for name in ("HOST", "PORT", "HF_HOME"):
        assert re.search(rf"^ENV .*\b{name}={re.escape(given[name])}\b", image, re.MULTILINE)
    (port,) = container["ports"]
    (served,) = objects["Service"]["spec"]["ports"]
    assert str(port["containerPort"]) == str(served["port"]) == given["PORT"]
    assert served["targetPort"] == port["name"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {given["HF_HOME"], "/tmp", "/dev/shm", "/etc/smart-embedder"}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert Path(given["API_TOKENS_FILE"]).parent == Path("/etc/smart-embedder")
    user = re.search(r"^USER (\d+):(\d+)$", image, re.MULTILINE)
    assert user is not None
    security = pod["securityContext"]
    assert (str(security["runAsUser"]), str(security["runAsGroup"])) == user.groups()
    assert container["image"].endswith(f":{__version__}-{overlay}")


def test_the_pod_is_hardened(pod, container) -> None:
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == ("tolerations" in pod)


def test_grace_period_is_longer_than_the_drain(objects, container, pod) -> None:
    drain = float(read_settings(objects, container)["SHUTDOWN_TIMEOUT"])
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    # A forward that runs when the drain ends gets SHUTDOWN_TIMEOUT to return (`EngineCore.close`).
    assert "SHUTDOWN_TIMEOUT" in str(core.EngineCore.close.__doc__)
    assert pod["terminationGracePeriodSeconds"] > pause + 2 * drain
    ready = container["readinessProbe"]
    assert pause >= ready["periodSeconds"]


def test_probes_and_the_autoscaling_metric_exist(objects, container, server: RunningServer) -> None:
    for probe, word in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        probe_target = container[f"{probe}Probe"]["httpGet"]
        assert (probe_target["path"], probe_target["port"]) == (f"/health/{word}", "http")
        assert server.get(probe_target["path"]).status_code == 200
    (metric,) = objects["HorizontalPodAutoscaler"]["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    rules = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert [rule["name"]["matches"] for rule in rules] == [name]
    assert all(rule["seriesQuery"].startswith(f"{name}{{") for rule in rules)
    notes = objects["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == "8000"
    metrics = server.get(notes["prometheus.io/path"]).text
    assert re.search(rf"^{name} ", metrics, re.MULTILINE)


def test_no_secret_is_in_the_repository(objects, pod, container) -> None:
    assert "Secret" not in objects
    (token,) = (variable for variable in container["env"] if variable["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["optional"]
    (secret,) = (volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    page = (ROOT / "docs" / "clusters.md").read_text()
    assert f"create secret generic {secret['secretName']} --from-file=tokens" in page
