"""The output of kustomize for deploy/kubernetes, checked by published schemas and the code."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from app.settings import Settings, load_settings
from scripts import kubernetes_rules
from smart_embedder import __version__, core
from smart_embedder.settings import LIBRARY_VARIABLES
from tests.support.env_example import listed_settings
from tests.support.server import RunningServer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
COMPONENTS = sorted(folder.name for folder in (FOLDER / "components").iterdir())
# The image of each overlay.
OVERLAYS = {"cpu": "cpu", "gpu": "gpu", "private-hub": "cpu"}
# The oldest version in which nothing of these objects needs a feature gate, and the newest with a
# schema.
VERSIONS = ("1.30", kubernetes_validate.latest_version())
NAME = {"app.kubernetes.io/name": "smart-embedder"}
QUEUES = ["embedding_queue_size", "rerank_active_requests"]
EVERYWHERE = {
    *("ServiceAccount", "ConfigMap", "Service", "Deployment", "PodDisruptionBudget"),
    "NetworkPolicy",
}
MONITORING = {"ConfigMap smart-embedder-dashboard", "PodMonitor", "PrometheusRule"}
# Their schemas are not published with Kubernetes: scripts/check_manifests.sh has them.
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject", "Gateway", "HTTPRoute"}
Objects = dict[str, dict[str, Any]]

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def objects(overlay: str) -> Objects:
    return build_objects(FOLDER / overlay)


@cache
def build_objects(folder: Path) -> Objects:
    """Render a folder: its objects by kind, and the dashboard by its name as well."""
    done = subprocess.run(
        ["kubectl", "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    objects: Objects = {}
    for manifest in yaml.safe_load_all(done.stdout):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        key = f"{kind} {name}" if name == "smart-embedder-dashboard" else kind
        assert key not in objects
        objects[key] = manifest
    return objects


@pytest.fixture
def build_with(tmp_path: Path):
    """Render the base with components, in the form that the overlays have."""

    def build(*components: str) -> Objects:
        shutil.copytree(FOLDER.parent, tmp_path / "deploy", dirs_exist_ok=True)
        folder = tmp_path / "deploy" / "kubernetes" / "-".join(components)
        folder.mkdir()
        listed = [f"../components/{component}" for component in components]
        overlay = {"resources": ["../base"], "components": listed}
        (folder / "kustomization.yaml").write_text(json.dumps(overlay))
        return build_objects(folder)

    return build


def read_pod(objects: Objects) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod and its only container."""
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def read_settings(objects: Objects) -> dict[str, str]:
    """Return the environment variables of the process."""
    _, container = read_pod(objects)
    (source,) = container["envFrom"]
    assert source["configMapRef"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    variables = {
        variable["name"]: variable["value"] for variable in container["env"] if "value" in variable
    }
    assert not variables.keys() & objects["ConfigMap"]["data"].keys()
    return objects["ConfigMap"]["data"] | variables


def validate_by_schemas(objects: Objects) -> None:
    """Validate every object that is Kubernetes' own, by the oldest and the newest version."""
    for manifest in objects.values():
        if manifest["kind"] not in CUSTOM:
            for version in VERSIONS:
                kubernetes_validate.validate(manifest, version, strict=True)


def test_objects_are_valid_by_the_published_schemas(objects: Objects, overlay: str) -> None:
    further = {
        "cpu": set(),
        "gpu": {"PersistentVolumeClaim", "HorizontalPodAutoscaler", "Gateway", "HTTPRoute"},
        "private-hub": {"ScaledObject", "Ingress"},
    }
    monitoring = set() if overlay == "cpu" else MONITORING
    assert set(objects) == EVERYWHERE | further[overlay] | monitoring
    validate_by_schemas(objects)
    misspelt = objects["Service"] | {"spec": {"portz": []}}
    for version in VERSIONS:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(misspelt, version, strict=True)


@pytest.mark.parametrize("component", COMPONENTS)
def test_component_alone_is_valid_and_listed(component: str, build_with) -> None:
    objects = build_with(component)
    validate_by_schemas(objects)
    assert objects.keys() >= EVERYWHERE
    named = (FOLDER / "cpu" / "kustomization.yaml").read_text()
    assert re.search(rf"^#   .*\b{component}\b", named, re.MULTILINE)
    assert f"`{component}`" in (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.parametrize("component", ["cache-shared", "cache-per-replica", "models-in-image"])
def test_models_are_stored_as_the_component_says(component: str, build_with) -> None:
    base = build_objects(FOLDER / "base")
    objects = build_with(component)
    pod, container = read_pod(objects)
    paths = {mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = [volume for volume in pod["volumes"] if volume["name"] == "model-cache"]
    if component == "models-in-image":
        assert "/app/model_cache" not in paths
        assert volumes == []
        assert read_settings(objects)["HF_HUB_OFFLINE"] == "true"
        (dns,) = objects["NetworkPolicy"]["spec"]["egress"]
        assert dns == base["NetworkPolicy"]["spec"]["egress"][0]
        return
    assert "/app/model_cache" in paths
    (volume,) = volumes
    assert "emptyDir" not in volume
    if component == "cache-shared":
        name = objects["PersistentVolumeClaim"]["metadata"]["name"]
        assert volume["persistentVolumeClaim"]["claimName"] == name
    else:
        claim = volume["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["accessModes"] == ["ReadWriteOnce"]


def test_local_models_volume_is_mounted_read_only(build_with) -> None:
    pod, container = read_pod(build_with("cache-shared", "local-models"))
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "models")
    assert volume["persistentVolumeClaim"]["readOnly"]
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "models")
    assert (mount["mountPath"], mount["readOnly"]) == ("/models", True)
    assert "/app/model_cache" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_ipv6_listens_on_both_families(build_with) -> None:
    objects = build_with("ipv6")
    assert read_settings(objects)["HOST"] == "::"
    assert objects["Service"]["spec"]["ipFamilyPolicy"] == "PreferDualStack"


def test_selectors_and_references_match(objects: Objects) -> None:
    pod, _ = read_pod(objects)
    deployment = objects["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == deployment["spec"]["selector"]["matchLabels"] == NAME
    assert objects["Service"]["spec"]["selector"] == NAME
    assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == NAME
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == NAME
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == NAME
    assert pod["serviceAccountName"] == objects["ServiceAccount"]["metadata"]["name"]
    claims = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert bool(claims) == ("PersistentVolumeClaim" in objects)


def test_settings_are_valid(objects: Objects, overlay: str) -> None:
    given = read_settings(objects)
    assert given.keys() <= listed_settings().keys() | LIBRARY_VARIABLES
    values = {name.lower(): value for name, value in given.items() if name not in LIBRARY_VARIABLES}
    settings = Settings.model_validate(values)
    assert settings.device == {"cpu": "cpu", "gpu": "cuda"}[OVERLAYS[overlay]]


def test_ports_and_paths_match_the_image(objects: Objects, overlay: str) -> None:
    pod, container = read_pod(objects)
    image = (ROOT / f"Dockerfile.{OVERLAYS[overlay]}").read_text()
    given = read_settings(objects)
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
    assert container["image"].endswith(f":{__version__}-{OVERLAYS[overlay]}")


def test_the_pod_is_hardened(objects: Objects) -> None:
    pod, container = read_pod(objects)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("overlay", "cpu", "memory"),
    [("cpu", "2", "8Gi"), ("gpu", None, "16Gi"), ("private-hub", "2", "4Gi")],
)
def test_resources_fit_the_number_format(overlay, cpu: str | None, memory: str) -> None:
    pod, container = read_pod(build_objects(FOLDER / overlay))
    limits = container["resources"]["limits"]
    assert (limits.get("cpu"), limits["memory"]) == (cpu, memory)
    assert container["resources"]["requests"]["memory"] == memory
    assert ("nvidia.com/gpu" in limits) == ("tolerations" in pod) == (overlay == "gpu")


def test_grace_period_is_longer_than_the_drain(objects: Objects) -> None:
    pod, container = read_pod(objects)
    given = read_settings(objects)
    delay, drain = float(given["SHUTDOWN_DELAY"]), float(given["SHUTDOWN_TIMEOUT"])
    # A forward that runs when the drain ends gets SHUTDOWN_TIMEOUT to return (`EngineCore.close`).
    assert "SHUTDOWN_TIMEOUT" in str(core.EngineCore.close.__doc__)
    assert pod["terminationGracePeriodSeconds"] > delay + 2 * drain
    ready = container["readinessProbe"]
    assert delay >= ready["periodSeconds"]
    start = container["startupProbe"]
    allowed = start["periodSeconds"] * start["failureThreshold"]
    assert objects["Deployment"]["spec"]["progressDeadlineSeconds"] > allowed


def test_probes_and_scraped_metrics_exist(objects: Objects, server: RunningServer) -> None:
    _, container = read_pod(objects)
    for probe, word in (("startup", "ready"), ("readiness", "ready"), ("liveness", "live")):
        probe_target = container[f"{probe}Probe"]["httpGet"]
        assert (probe_target["path"], probe_target["port"]) == (f"/health/{word}", "http")
        assert server.get(probe_target["path"]).status_code == 200
    template = objects["Deployment"]["spec"]["template"]["metadata"]
    if "PodMonitor" in objects:
        monitor = objects["PodMonitor"]["spec"]
        assert "annotations" not in template
        assert monitor["selector"]["matchLabels"] == NAME
        # The alerts name this job.
        assert NAME[monitor["jobLabel"]] == "smart-embedder"
        (endpoint,) = monitor["podMetricsEndpoints"]
        assert endpoint["port"] == container["ports"][0]["name"]
        path = endpoint["path"]
    else:
        assert template["annotations"]["prometheus.io/port"] == "8000"
        path = template["annotations"]["prometheus.io/path"]
    metrics = server.get(path).text
    for name in QUEUES:
        assert re.search(rf"^{name} ", metrics, re.MULTILINE)


def test_autoscaler_asks_for_the_metrics_that_the_adapter_serves() -> None:
    objects = build_objects(FOLDER / "gpu")
    autoscaler = objects["HorizontalPodAutoscaler"]["spec"]
    assert autoscaler["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    assert "replicas" not in objects["Deployment"]["spec"]
    assert [metric["pods"]["metric"]["name"] for metric in autoscaler["metrics"]] == QUEUES
    adapter = FOLDER / "components" / "autoscaler" / "prometheus-adapter.yaml"
    rules = yaml.safe_load(adapter.read_text())["rules"]["custom"]
    assert [rule["name"]["matches"] for rule in rules] == QUEUES
    assert [rule["seriesQuery"].partition("{")[0] for rule in rules] == QUEUES


def test_keda_scales_as_the_autoscaler_does() -> None:
    scaled = build_objects(FOLDER / "private-hub")["ScaledObject"]["spec"]
    deployment = build_objects(FOLDER / "private-hub")["Deployment"]
    autoscaler = build_objects(FOLDER / "gpu")["HorizontalPodAutoscaler"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]
    counts = scaled["minReplicaCount"], scaled["maxReplicaCount"]
    assert counts == (autoscaler["minReplicas"], autoscaler["maxReplicas"])
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == autoscaler["behavior"]
    for trigger, metric in zip(scaled["triggers"], autoscaler["metrics"], strict=True):
        pods = metric["pods"]
        assert f"({pods['metric']['name']}{{" in trigger["metadata"]["query"]
        assert trigger["metadata"]["threshold"] == pods["target"]["averageValue"]


@pytest.mark.parametrize(
    ("overlay", "entrance", "namespace"),
    [("gpu", "HTTPRoute", "envoy-gateway-system"), ("private-hub", "Ingress", "ingress-nginx")],
)
def test_entrance_has_tls_and_may_reach_the_pods(overlay, entrance: str, namespace: str) -> None:
    objects = build_objects(FOLDER / overlay)
    service, host = objects["Service"], "embed.example.org"
    spec = objects[entrance]["spec"]
    if entrance == "Ingress":
        assert spec["tls"] == [{"hosts": [host], "secretName": "smart-embedder-tls"}]
        (rule,) = spec["rules"]
        backend = rule["http"]["paths"][0]["backend"]["service"]
        assert rule["host"] == host
        assert backend["port"]["name"] == service["spec"]["ports"][0]["name"]
    else:
        (listener,) = objects["Gateway"]["spec"]["listeners"]
        assert listener["hostname"] == host
        assert listener["tls"]["certificateRefs"] == [{"name": "smart-embedder-tls"}]
        assert spec["hostnames"] == [host]
        (parent,) = spec["parentRefs"]
        assert parent["name"] == objects["Gateway"]["metadata"]["name"]
        assert parent["sectionName"] == listener["name"]
        (backend,) = spec["rules"][0]["backendRefs"]
        assert backend["port"] == service["spec"]["ports"][0]["port"]
    assert backend["name"] == service["metadata"]["name"]
    callers = objects["NetworkPolicy"]["spec"]["ingress"][0]["from"]
    labels = {"kubernetes.io/metadata.name": namespace}
    assert {"namespaceSelector": {"matchLabels": labels}} in callers


def test_alerts_and_dashboard_are_those_of_compose() -> None:
    assert kubernetes_rules.OBJECT.read_text() == kubernetes_rules.rule_object()
    objects = build_objects(FOLDER / "gpu")
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
    assert objects["PrometheusRule"]["spec"] == rules
    ours = [objects["PodMonitor"], objects["PrometheusRule"]]
    assert {ours["metadata"]["labels"]["release"] for ours in ours} == {"kube-prometheus-stack"}
    dashboard = objects["ConfigMap smart-embedder-dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    file = ROOT / "deploy" / "grafana" / "dashboards" / "smart-embedder.json"
    assert dashboard["data"] == {file.name: file.read_text()}


def test_no_secret_is_in_the_repository(objects: Objects) -> None:
    pod, container = read_pod(objects)
    assert "Secret" not in objects
    (token,) = (variable for variable in container["env"] if variable["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["optional"]
    (secret,) = (volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    page = (ROOT / "docs" / "clusters.md").read_text()
    assert f"create secret generic {secret['secretName']} --from-file=tokens" in page


def test_kserve_runtime_of_the_docs_starts_the_service(monkeypatch, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    (block,) = re.findall(r"```yaml\n(apiVersion: serving\.kserve.+?)```", page, re.DOTALL)
    runtime, service = yaml.safe_load_all(block)
    (container,) = runtime["spec"]["containers"]
    monkeypatch.chdir(tmp_path)
    settings = load_settings(container["args"])
    # Where KServe puts what `storageUri` names.
    assert settings.embedding_model == "/mnt/models"
    (port,) = container["ports"]
    assert container["readinessProbe"]["httpGet"]["port"] == port["containerPort"] == settings.port
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {
        supported["name"] for supported in runtime["spec"]["supportedModelFormats"]
    }
