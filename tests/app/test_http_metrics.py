"""All series of a service exist from the start, and gauges have the values that they watch."""

from dataclasses import replace
from functools import partial

import pytest

from app.http_metrics import Metrics, describe_server
from app.settings import Settings
from smart_embedder.core import EngineCore
from smart_embedder.settings import EngineSettings
from tests.smart_embedder.fakes import FakeModel, FakeReranker, loaded, loading


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def samples(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """The values of a metric, by the values of its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_two_services_in_one_process_have_separate_metrics(metrics) -> None:
    metrics.sentences.inc(3)
    assert metrics.value("embedding_sentences_processed_total") == 3
    assert Metrics().value("embedding_sentences_processed_total") == 0
    assert metrics.value("no_such_series", a="b") == 0


def test_gauges_are_read_when_they_are_scraped(metrics) -> None:
    now = {"memory": 10}
    metrics.watch_memory(lambda kind: now["memory"] + len(kind))
    now["memory"] = 20
    for kind in ("allocated", "reserved", "free", "total"):
        assert metrics.value(f"gpu_memory_{kind}_bytes") == 20 + len(kind)
    for kind in ("allocated", "reserved"):
        assert metrics.value(f"embedding_gpu_memory_{kind}_bytes") == 20 + len(kind)


def test_the_model_state_metric_has_one_state_at_a_time(metrics) -> None:
    states = ["loading", "loaded"]
    for index, name in enumerate("ab"):
        in_which = partial(states.__getitem__, index)
        metrics.watch_model(name, ("loading", "loaded", "failed"), in_which)
    metrics.watch_further_model("b", lambda: 3)
    found = samples(metrics, "embedder_model_state")
    assert {labels for labels, value in found.items() if value} == {
        ("a", "loading"),
        ("b", "loaded"),
    }
    assert len(found) == 6
    states[0] = "failed"
    assert metrics.value("embedder_model_state", model="a", state="failed") == 1
    assert metrics.value("embedder_model_state", model="a", state="loading") == 0
    assert samples(metrics, "embedder_tokens_processed_total") == {("a",): 0, ("b",): 0}
    assert samples(metrics, "embedder_model_requests") == {("b",): 3}
    loads = {("b", "success"): 0, ("b", "failure"): 0}
    assert samples(metrics, "embedder_model_loads_total") == loads
    assert samples(metrics, "embedder_model_unloads_total") == {("b",): 0}
    metrics.replaced("b")
    assert samples(metrics, "embedder_model_replacements_total") == {("b",): 1}


def test_the_queue_capacity_metrics_have_the_limits_of_the_settings(metrics) -> None:
    settings = EngineSettings(max_queue_size=7, rerank_max_queue=8)
    metrics.watch(EngineCore(settings, loading(loaded(FakeModel())), metrics), settings)
    assert metrics.value("embedder_embedding_queue_capacity") == 7
    assert metrics.value("embedder_rerank_queue_capacity") == 8


class Judge(FakeReranker):
    max_length = 55


class Probabilities(Judge):
    always_normalizes = True


class Dense(FakeModel):
    max_length = 77


@pytest.mark.parametrize(
    ("dense", "reranker", "expected"),
    [
        (None, None, ("100", "none", "none", "none")),
        (Dense(), Judge(), ("100", "77", "55", "none")),
        (None, Probabilities(), ("100", "none", "none", "55")),
        (None, "late-interaction", ("100", "none", "100", "none")),
    ],
)
def test_server_info_has_the_lengths_of_the_models(dense, reranker, expected) -> None:
    lengths = {"bge_rerank": 11, "qwen_rerank": 12, "qwen_embed": 13}
    settings = {f"{kind}_max_length": length for kind, length in lengths.items()}
    late = reranker == "late-interaction"
    models = replace(loaded(FakeModel()), dense=dense, late_interaction=late)
    models = models if late else replace(models, reranker=reranker)
    labels = describe_server(Settings(embedding_model="/models/private/mine", **settings), models)
    names = ("bge_embed", "qwen_embed", "bge_rerank", "qwen_rerank")
    assert tuple(labels[f"{name}_max_length"] for name in names) == expected
    assert (labels["model"], labels["gpu_available"], labels["device"]) == ("mine", "false", "cpu")
