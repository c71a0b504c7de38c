"""Prometheus scrapes a server: dashboard and alerts find their series."""

import json
import math
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.prometheus_server import (
    DEPLOYED,
    PROMTOOL,
    PrometheusServer,
    needs_prometheus,
    run_prometheus,
)
from tests.support.server import RunningServer
from tests.support.waiting import wait_until

DASHBOARD = DEPLOYED.parent / "grafana" / "dashboards" / "smart-embedder.json"
RULES = yaml.safe_load((DEPLOYED / "rules.yml").read_text())["groups"][0]["rules"]
PANELS = json.loads(DASHBOARD.read_text())["panels"]
MAX_BODY = 100_000
FURTHER = "further-m3"

pytestmark = needs_prometheus


def fill_variables(expression: str) -> str:
    """Replace the variables of a dashboard's expression, as Grafana does."""
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*")


def dashboard_expressions() -> list[str]:
    return [fill_variables(target["expr"]) for panel in PANELS for target in panel["targets"]]


def alert_expressions() -> list[str]:
    """Return the left sides of all alerts: the comparisons have no value unless an alert fires."""
    comparisons = [re.fullmatch(r"(.+) (?:==|>) [\d.]+", rule["expr"]) for rule in RULES]
    assert all(comparisons)
    return [comparison[1] for comparison in comparisons if comparison]


@pytest.fixture(scope="module")
def embedder(
    serve, tiny_m3: Path, tiny_reranker: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / FURTHER).symlink_to(tiny_m3)
    models = folder / "models.yaml"
    models.write_text(f"- name: {folder / FURTHER}\n", "utf-8")
    settings = {"RERANKER_MODEL": str(tiny_reranker), "EMBEDDING_CACHE_BYTES": str(2**28)}
    with serve(MODELS=str(models), MAX_BODY_BYTES=str(MAX_BODY), **settings) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(
    embedder: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PrometheusServer]:
    """A Prometheus that has scraped the server before and after some load."""
    target = embedder.url.removeprefix("http://")
    with run_prometheus(tmp_path_factory.mktemp("prometheus"), target) as running:
        wait_until(lambda: count_scraped_reranks(running) == 0, "never scraped")
        send_load(embedder)
        wait_until(lambda: count_scraped_reranks(running) == 3, "never scraped after the load")
        yield running


def count_scraped_reranks(prometheus: PrometheusServer) -> float | None:
    samples = prometheus.query('rerank_requests_total{status="success"}')
    return samples[0][1] if samples else None


def send_load(server: RunningServer) -> None:
    """Send some load; a scrape with the three last rerank requests has seen all of it."""
    with server.client() as client:
        for count in (1, 5, 20):
            body = {"sentences": [f"text number {n}" for n in range(count)]}
            assert client.post("/embeddings/", json=body).status_code == 200
        assert client.post("/embeddings/", json=body | {"model": FURTHER}).status_code == 200
        assert client.post("/embeddings/", json={"sentences": []}).status_code == 400
        assert client.post("/embeddings/", content=b"x" * (MAX_BODY + 1)).status_code == 413
        for _ in range(3):
            body = {"query": "a query", "passages": ["one passage", "another one"]}
            assert client.post("/rerank", json=body).status_code == 200


def guide_expressions() -> list[str]:
    page = DEPLOYED.parents[1] / "docs" / "monitoring.md"
    queries = re.findall(r"```promql\n(.+?)\n```", page.read_text(encoding="utf-8"), re.DOTALL)
    # The server has run only for seconds.
    return [re.sub(r"\[(5m|1h)\]", "[1m]", query) for query in queries]


ASKED = [*dashboard_expressions(), *alert_expressions(), *guide_expressions()]


@pytest.mark.parametrize("expression", ASKED)
def test_expression_has_data(prometheus: PrometheusServer, expression: str) -> None:
    values = [value for _, value in prometheus.query(expression)]
    assert values
    assert all(math.isfinite(value) for value in values), values


def test_alerts_can_be_evaluated_and_none_fires(prometheus: PrometheusServer) -> None:
    def read_alert_field(fact: str) -> dict[str, object]:
        (group,) = prometheus.get("rules")["groups"]
        return {rule["name"]: rule[fact] for rule in group["rules"]}

    wait_until(
        lambda: set(read_alert_field("health").values()) == {"ok"},
        "the alerts were never all evaluated",
    )
    assert read_alert_field("state") == {rule["alert"]: "inactive" for rule in RULES}


def promtool(*arguments: str, given: str = "") -> tuple[int, str]:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], input=given, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_metrics_pass_promtool(embedder: RunningServer) -> None:
    with embedder.client() as client:
        assert promtool("check", "metrics", given=client.get("/metrics").text) == (0, "")


def test_configuration_is_valid_and_alerts_fire() -> None:
    for *command, file in (
        ("check", "config", "prometheus.yml"),
        ("test", "rules", "rules_test.yml"),
    ):
        status, said = promtool(*command, str(DEPLOYED / file))
        assert (status, "FAILED" in said) == (0, False), said


@pytest.mark.parametrize("alert", [rule["alert"] for rule in RULES])
def test_alert_has_tests_and_a_section_in_the_docs(alert: str) -> None:
    tests = yaml.safe_load((DEPLOYED / "rules_test.yml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    fires = {bool(case.get("exp_alerts")) for case in cases if case["alertname"] == alert}
    assert fires == {True, False}
    manual = (DEPLOYED.parents[1] / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert f"`{alert}`" in manual
