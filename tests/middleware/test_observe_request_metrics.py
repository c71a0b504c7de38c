"""Every request counts once, on its endpoint and by its outcome; /stats agrees."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from smart_embedder import errors
from smart_embedder.api.endpoints.operations import totals
from smart_embedder.api.errors import error_response
from smart_embedder.middleware.observe import MeasureRequests, ProvideContext
from smart_embedder.observability.metrics import REJECTION_REASONS, Metrics
from tests.support.paths import PATHS

REJECTED = {
    errors.QueueFullError: "backpressure",
    errors.RateLimitedError: "rate_limit",
    errors.UnauthorizedError: "auth",
    errors.BodyTooLargeError: "body_too_large",
    errors.LoadingError: "loading",
    errors.ModelNotLoadedError: "model",
    errors.ModelTooLargeError: "model",
    errors.DrainingError: "draining",
    errors.UnhealthyError: "unhealthy",
    errors.RerankerDisabledError: "disabled",
    errors.ForeignOriginError: "origin",
}
ANSWERED = {
    errors.EmptyInputError: "client_error",
    errors.InvalidRequestError: "client_error",
    errors.UnsupportedMediaError: "client_error",
    errors.OutOfMemoryError: "error",
    errors.InferenceError: "error",
    errors.InferenceTimeoutError: "timeout",
}
ENDPOINTS = [("/embeddings", "embedding"), ("/embeddings/", "embedding"), ("/rerank", "rerank")]


async def send(_message) -> None:
    """A client that reads everything."""


async def ask(metrics: Metrics, path: str, error: type[errors.SmartEmbedderError]) -> None:
    async def refuse(scope, receive, send) -> None:
        await error_response(scope, error("no"))(scope, receive, send)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "client": None}
    await ProvideContext(MeasureRequests(refuse, metrics, PATHS.endpoints), [], PATHS)(
        scope, None, send
    )


def moved(metrics: Metrics) -> dict[str, float]:
    """Every count of requests that is not zero, and the counts of the duration histograms."""
    return {
        f"{sample.name} {sample.labels.get('status', sample.labels.get('reason', ''))}".strip(): (
            sample.value
        )
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.value
        and sample.name.endswith(("requests_total", "rejected_total", "duration_seconds_count"))
    }


@pytest.mark.parametrize(("path", "prefix"), ENDPOINTS)
@pytest.mark.parametrize(("error", "reason"), REJECTED.items())
async def test_a_rejection_counts_on_the_endpoint_it_hit(path, prefix, error, reason) -> None:
    metrics = Metrics()
    await ask(metrics, path, error)
    assert moved(metrics) == {f"{prefix}_requests_rejected_total {reason}": 1}
    stats = totals(metrics)
    assert (stats["total_requests"], stats["rejected_requests"]) == (0, 1)


@pytest.mark.parametrize(("path", "prefix"), ENDPOINTS)
@pytest.mark.parametrize(("error", "status"), ANSWERED.items())
async def test_what_was_malformed_does_not_enter_the_durations(path, prefix, error, status) -> None:
    metrics = Metrics()
    await ask(metrics, path, error)
    expected: dict[str, float] = {f"{prefix}_requests_total {status}": 1}
    if status != "client_error":
        expected[f"{prefix}_request_duration_seconds_count"] = 1
    assert moved(metrics) == expected
    stats = totals(metrics)
    assert (stats["total_requests"], stats["rejected_requests"]) == (1, 0)


async def test_a_request_whose_client_left_is_neither_answered_nor_rejected() -> None:
    metrics = Metrics()
    await ask(metrics, "/rerank", errors.ClientGoneError)
    assert moved(metrics) == {"embedder_abandoned_requests_total": 1}


def test_every_reason_that_there_is_can_be_counted() -> None:
    assert set(REJECTED.values()) == set(REJECTION_REASONS)
