"""The compose files: their contents, and the configuration that docker compose reads."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import Settings
from scripts.settings_docs import LIBRARY_VARIABLES

ROOT = Path(__file__).resolve().parents[2]
GPU, CPU = "docker-compose.gpu.yml", "docker-compose.cpu.yml"
FILES = (GPU, CPU)
OURS = "embedder"
SECOND = "embedder-2"
MOUNTED_TOKENS = "/app/api_tokens"
# Properties of the container, not of the deployment.
COMMON = {
    "HOST": "0.0.0.0",
    "PORT": "8000",
    "HF_HOME": "/app/model_cache",
    "API_TOKENS_FILE": f"${{API_TOKENS_FILE:+{MOUNTED_TOKENS}}}",
}
PROXY = "192.0.2.2"
FIXED = COMMON | {
    "DEVICE": "cpu",
    "TRUSTED_PROXIES": "${TRUSTED_PROXIES:-${HTTPS_NETWORK:-192.0.2}.2}",
    "SHUTDOWN_DELAY": "${SHUTDOWN_DELAY:-2}",
}
PROFILES = {
    "second": [SECOND],
    "https": ["https"],
    "monitoring": ["prometheus", "grafana"],
    "qdrant": ["qdrant"],
}
IMAGE = re.compile(r"([a-z]+/)?[a-z]+:v?\d+\.\d+\.\d+(-[a-z]+)?@sha256:[0-9a-f]{64}")


class ComposeLoader(yaml.SafeLoader):
    """Refuses duplicate keys, and reads a list with `!override` as a list."""

    def mapping(self, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), keys
        self.flatten_mapping(node)
        return self.construct_mapping(node, deep=True)

    def overriding(self, node: yaml.SequenceNode) -> list[Any]:
        return self.construct_sequence(node)

    def removed(self, _: yaml.Node) -> None:
        return None


ComposeLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, ComposeLoader.mapping)
ComposeLoader.add_constructor("!override", ComposeLoader.overriding)
ComposeLoader.add_constructor("!reset", ComposeLoader.removed)


def parsed(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load((ROOT / name).read_text(), Loader=ComposeLoader)
    return loaded


def test_every_setting_is_passed_through_and_none_twice() -> None:
    ours = parsed(CPU)["services"][OURS]
    passed = ours["environment"]
    settings = [name.upper() for name in Settings.model_fields]
    assert list(passed) == [*settings, *(variable.name for variable in LIBRARY_VARIABLES)]
    assert {name: value for name, value in passed.items() if value is not None} == FIXED
    assert "env_file" not in ours


def test_containers_are_limited_hardened_and_local_except_https() -> None:
    ports = {}
    for name, service in parsed(CPU)["services"].items():
        assert re.fullmatch(r"\$\{[A-Z_]*MEMORY_LIMIT:-\d+g\}", service["mem_limit"])
        assert service["pids_limit"] == "${PIDS_LIMIT:-2048}"
        assert service["cap_drop"] == ["ALL"]
        assert service.get("cap_add", []) == (["NET_BIND_SERVICE"] if name == "https" else [])
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert (service["init"], service["read_only"]) == (True, True)
        assert service["restart"] == "unless-stopped"
        assert set(service["logging"]["options"]) == {"max-size", "max-file"}
        assert not {"privileged", "network_mode", "pid"} & set(service)
        ports[name] = service["ports"]
        for mount in service["volumes"]:
            if isinstance(mount, str) and mount.startswith("./"):
                assert (ROOT / mount.split(":")[0]).is_dir(), mount
    assert ports.pop("https") == ["80:80", "443:443", "443:443/udp"]
    assert all(port.startswith("127.0.0.1:") for published in ports.values() for port in published)
    assert (ROOT / "deploy" / "no-tokens").read_text() == ""
    assert (ROOT / "deploy" / "models").is_dir()


def test_third_party_images_are_pinned_and_optional() -> None:
    services = parsed(CPU)["services"]
    optional = {
        name: service["profiles"] for name, service in services.items() if "profiles" in service
    }
    assert optional == {name: [profile] for profile, names in PROFILES.items() for name in names}
    assert set(services) - set(optional) == {OURS}
    others = [services[name]["image"] for name in services if name not in {OURS, SECOND}]
    assert all(IMAGE.fullmatch(image) for image in others), others


def test_grafana_finds_its_dashboard_and_prometheus() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/smart-embedder.yml").read_text())[
        "providers"
    ]
    services = parsed(CPU)["services"]
    mounts = services["grafana"]["volumes"]
    dashboards = provider["options"]["path"]
    assert f"./deploy/grafana/dashboards:{dashboards}:ro" in mounts
    assert "./deploy/grafana/provisioning:/etc/grafana/provisioning:ro" in mounts
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{dashboards}/smart-embedder.json"
    assert source["url"] == "http://prometheus:9090"
    board = json.loads((ROOT / "deploy/grafana/dashboards/smart-embedder.json").read_text())
    panels = board["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    variable = board["templating"]["list"][0]
    assert (variable["type"], variable["query"]) == ("datasource", source["type"])
    uids = {item["datasource"]["uid"] for item in panels + targets}
    assert uids == {f"${{{variable['name']}}}"}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len({panel["id"] for panel in panels}) == len(panels)


def compose_command() -> list[str] | None:
    """Docker compose in a recent version; it needs no docker engine here."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        version_command = [*command, "version", "--short"]
        done = subprocess.run(version_command, capture_output=True, text=True, check=False)
        found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", done.stdout)
        if done.returncode == 0 and found and tuple(map(int, found.groups())) >= (2, 24, 4):
            return command
    return None


COMPOSE = compose_command()
needs_compose = pytest.mark.skipif(
    COMPOSE is None, reason="docker compose 2.24.4 or newer is not installed"
)


def configured(
    *names: str, folder: Path, profile: str = "*", project: str = "", **environment: str
) -> dict[str, Any]:
    """Return the configuration that compose reads with only these environment variables."""
    read = _read(names, folder, profile, project, *environment.items())
    found: dict[str, Any] = json.loads(read)
    found.pop("x-hardened", None)  # Shared by services, where it has had its effect.
    return found


@cache
def _read(
    names: tuple[str, ...], folder: Path, profile: str, project: str, *variables: tuple[str, str]
) -> str:
    assert COMPOSE is not None
    files = [word for name in names for word in ("-f", str(folder / name))]
    named = ["-p", project] if project else []
    arguments = [*files, *named, "--profile", profile, "config", "--format", "json"]
    done = subprocess.run(
        [*COMPOSE, *arguments],
        env={k: v for k, v in os.environ.items() if k in {"PATH", "HOME"}} | dict(variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "is not set" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both compose files and no .env."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    return folder


@needs_compose
def test_the_two_files_differ_only_in_the_device(checkout: Path) -> None:
    gpu, cpu = (configured(name, folder=checkout) for name in FILES)
    for name, suffix in ((OURS, ""), (SECOND, "-2")):
        ours = gpu["services"][name], cpu["services"][name]
        for service, device in zip(ours, ("gpu", "cpu"), strict=True):
            assert service.pop("container_name") == f"smart-embedder-{device}{suffix}"
            assert service.pop("image") == f"smart-embedder:{device}"
            assert service["build"].pop("dockerfile") == f"Dockerfile.{device}"
            assert service["environment"].pop("DEVICE") == {"gpu": "auto", "cpu": "cpu"}[device]
        (reserved,) = ours[0].pop("deploy")["resources"]["reservations"]["devices"]
        assert (reserved["driver"], reserved["capabilities"]) == ("nvidia", ["gpu"])
        allocator = [service["environment"].pop("PYTORCH_CUDA_ALLOC_CONF") for service in ours]
        assert allocator == ["expandable_segments:True", None]
    assert gpu == cpu


@needs_compose
def test_a_compose_file_works_alone(checkout: Path) -> None:
    project = configured(CPU, folder=checkout)
    ours = project["services"][OURS]
    assert project["name"] == "smart-embedder"
    limits = {
        name: int(service["mem_limit"]) >> 30 for name, service in project["services"].items()
    }
    assert limits == {OURS: 16, SECOND: 16, "https": 1, "prometheus": 1, "grafana": 1, "qdrant": 4}
    assert all(service["pids_limit"] == 2048 for service in project["services"].values())
    assert project["volumes"]["model-cache"]["name"] == "smart-embedder-hf-cache"
    assert int(ours["shm_size"]) == 1 << 30
    (port,) = ours["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "8000", 8000)
    # The stop grace period is longer than the drain.
    drain = Settings.model_fields["shutdown_timeout"].default
    delay = int(ours["environment"]["SHUTDOWN_DELAY"])
    assert int(ours["stop_grace_period"].removesuffix("s")) > delay + drain


@needs_compose
def test_last_compose_file_decides_and_profiles_add_services(checkout: Path) -> None:
    for names in ((GPU, CPU), (CPU, GPU)):
        both = configured(*names, folder=checkout)
        assert both == configured(names[-1], folder=checkout)
        hardened = [service["security_opt"] for service in both["services"].values()]
        assert hardened == [["no-new-privileges:true"]] * 6
    for profile, beside in PROFILES.items():
        started = configured(CPU, folder=checkout, profile=profile)["services"]
        assert set(started) == {OURS, *beside}


@needs_compose
def test_second_replica_is_the_first_without_its_port(checkout: Path) -> None:
    both = "embedder:8000 embedder-2:8000"
    for name in FILES:
        project = configured(name, folder=checkout, UPSTREAMS=both)
        first, second = project["services"][OURS], project["services"][SECOND]
        assert second.pop("profiles") == ["second"]
        assert second.pop("container_name") == f"{first.pop('container_name')}-2"
        assert "ports" not in second
        first.pop("ports")
        assert first == second
        assert project["services"]["https"]["environment"]["SERVICE"] == both


@needs_compose
def test_service_trusts_only_the_address_of_the_proxy(
    checkout: Path,
) -> None:
    for given, proxy_address in (({}, PROXY), ({"HTTPS_NETWORK": "198.51.100"}, "198.51.100.2")):
        project = configured(CPU, folder=checkout, **given)
        proxy, ours = project["services"]["https"], project["services"][OURS]
        assert proxy["networks"]["https"] == {"ipv4_address": proxy_address}
        assert proxy["environment"]["SERVICE"] == f"{OURS}:8000"
        assert ours["environment"]["TRUSTED_PROXIES"] == proxy_address
        assert "https" in ours["networks"]
        network = project["networks"]["https"]
        (pool,) = network["ipam"]["config"]
        assert network["internal"]
        assert ip_address(proxy_address) in ip_network(pool["subnet"])
        assert ip_address(proxy_address) not in ip_network(pool["ip_range"])


def names_on_the_host(project: dict[str, Any]) -> Iterator[str]:
    """Yield the names, addresses and ports that another project cannot use."""
    for service in project["services"].values():
        yield "container " + service["container_name"]
        yield from ("port " + port["published"] for port in service.get("ports", ()))
    yield "image " + project["services"][OURS]["image"]
    for volume in project["volumes"].values():
        yield "volume " + volume["name"]
    for network in project["networks"].values():
        yield "network " + network["name"]
        for pool in network["ipam"].get("config", ()):
            yield "subnet " + pool["subnet"]


@needs_compose
def test_second_project_shares_only_models_and_https_ports(
    checkout: Path,
) -> None:
    ports = {
        variable: str(port)
        for port, variable in enumerate(
            ("PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "QDRANT_PORT", "QDRANT_GRPC_PORT"), 7000
        )
    }
    first = set(names_on_the_host(configured(CPU, folder=checkout)))
    for default in (
        "container smart-embedder-cpu",
        "container smart-embedder-grafana",
        "image smart-embedder:cpu",
        "volume smart-embedder-qdrant",
        "subnet 192.0.2.0/28",
    ):
        assert default in first
    second = configured(
        CPU, folder=checkout, project="staging", HTTPS_NETWORK="198.51.100", **ports
    )
    assert second["services"][OURS]["container_name"] == "staging-cpu"
    shared = first & set(names_on_the_host(second))
    # Certificates can only be fetched through ports 80 and 443.
    assert shared == {"volume smart-embedder-hf-cache", "port 80", "port 443"}


@needs_compose
def test_settings_come_from_the_shell_or_dotenv(tmp_path: Path) -> None:
    shutil.copy(ROOT / CPU, tmp_path)
    (tmp_path / ".env").write_text(
        "DTYPE=float32\nHOST=127.0.0.1\nPORT=9000\nHF_HOME=/home/me/models\nRERANKER_MODEL=none\n"
        "MEMORY_LIMIT=6g\nDEVICE=cuda\n"
        "HF_CACHE_VOLUME=elsewhere\n"
    )
    project = configured(CPU, folder=tmp_path, RERANKER_MODEL="late-interaction", API_TOKEN="open")
    ours = project["services"][OURS]
    given = {name: value for name, value in ours["environment"].items() if value is not None}
    assert given == {
        "DTYPE": "float32",
        "RERANKER_MODEL": "late-interaction",
        "API_TOKEN": "open",
        "API_TOKENS_FILE": "",
        "HOST": "0.0.0.0",
        "PORT": "8000",
        "HF_HOME": "/app/model_cache",
        "DEVICE": "cpu",
        "TRUSTED_PROXIES": PROXY,
        "SHUTDOWN_DELAY": "2",
    }
    assert int(ours["mem_limit"]) == 6 << 30
    assert ours["ports"][0]["published"] == "9000"
    assert project["volumes"]["model-cache"]["name"] == "elsewhere"


@needs_compose
@pytest.mark.parametrize(
    ("given", "target", "source", "passed"),
    [
        ({"API_TOKENS_FILE": "tokens.txt"}, MOUNTED_TOKENS, "tokens.txt", MOUNTED_TOKENS),
        ({"API_TOKENS_FILE": ""}, MOUNTED_TOKENS, "deploy/no-tokens", ""),
        ({"MODELS_FOLDER": "/srv/models", "MODELS": "a"}, "/models", "/srv/models", None),
        ({"MODELS_FOLDER": "", "MODELS": "a"}, "/models", "deploy/models", None),
    ],
)
def test_folders_of_settings_are_mounted_read_only(
    checkout: Path, given: dict[str, str], target: str, source: str, passed: str | None
) -> None:
    ours = configured(CPU, folder=checkout, **given)["services"][OURS]
    (mount,) = (mount for mount in ours["volumes"] if mount["target"] == target)
    assert (mount["type"], mount["read_only"]) == ("bind", True)
    assert mount["source"] == str(checkout / source)
    if passed is None:
        assert ours["environment"]["MODELS"] == given["MODELS"]
    else:
        assert ours["environment"]["API_TOKENS_FILE"] == passed
