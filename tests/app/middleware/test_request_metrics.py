"""Metrics of requests: outcomes, rejections, abandoned requests and durations."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.error_responses import error_response
from app.errors import (
    BodyTooLargeError,
    ClientGoneError,
    ForeignOriginError,
    RateLimitedError,
    UnauthorizedError,
    UnsupportedMediaError,
)
from app.http_metrics import REJECTION_REASONS, Metrics
from app.middleware.request_metrics import MeasureRequests
from app.routers.stats import sum_totals
from smart_embedder import errors
from tests.app.middleware.exchange import exchange
from tests.support.paths import PATHS

REJECTED = {
    errors.QueueFullError: "backpressure",
    RateLimitedError: "rate_limit",
    UnauthorizedError: "auth",
    BodyTooLargeError: "body_too_large",
    errors.LoadingError: "loading",
    errors.ModelNotLoadedError: "model",
    errors.ModelTooLargeError: "model",
    errors.DrainingError: "draining",
    errors.UnhealthyError: "unhealthy",
    errors.RerankerDisabledError: "disabled",
    ForeignOriginError: "origin",
}
ANSWERED = {
    errors.EmptyInputError: "client_error",
    errors.InvalidRequestError: "client_error",
    UnsupportedMediaError: "client_error",
    errors.OutOfMemoryError: "error",
    errors.InferenceError: "error",
    errors.InferenceTimeoutError: "timeout",
}
REJECTION, ANSWER = "requests_rejected_total", "requests_total"
COUNTED = [
    *((error, REJECTION, reason) for error, reason in REJECTED.items()),
    *((error, ANSWER, status) for error, status in ANSWERED.items()),
]


async def ask(metrics: Metrics, path: str, error: type[errors.SmartEmbedderError]) -> None:
    async def refuse(scope, receive, send) -> None:
        await error_response(scope, error("no"))(scope, receive, send)

    await exchange(MeasureRequests(refuse, metrics, PATHS.endpoints), path=path)


def nonzero_counts(metrics: Metrics) -> dict[str, float]:
    """The counters of requests that are not zero, and the counts of the duration histograms."""
    return {
        f"{sample.name} {sample.labels.get('status', sample.labels.get('reason', ''))}".strip(): (
            sample.value
        )
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.value
        and sample.name.endswith(("requests_total", "rejected_total", "duration_seconds_count"))
    }


@pytest.mark.parametrize(("error", "series", "label"), COUNTED)
async def test_an_error_counts_on_its_endpoint_and_in_the_durations_if_work_was_done(
    error, series, label
) -> None:
    metrics = Metrics()
    await ask(metrics, "/embeddings/", error)
    expected: dict[str, float] = {f"embedding_{series} {label}": 1}
    if series == ANSWER and label != "client_error":
        expected["embedding_request_duration_seconds_count"] = 1
    assert nonzero_counts(metrics) == expected
    stats = sum_totals(metrics)
    counts = (stats["total_requests"], stats["rejected_requests"])
    assert counts == ((1, 0) if series == ANSWER else (0, 1))


# Requests for tokens are counted separately.
@pytest.mark.parametrize(
    ("path", "prefix", "totals"),
    [("/rerank", "rerank", (1, 1)), ("/tokenize", "embedder_tokenize", (0, 0))],
)
async def test_each_endpoint_has_its_series(path, prefix, totals) -> None:
    metrics = Metrics()
    for error in (errors.InferenceError, errors.DrainingError):
        await ask(metrics, path, error)
    names = (f"{ANSWER} error", f"{REJECTION} draining", "request_duration_seconds_count")
    assert nonzero_counts(metrics) == {f"{prefix}_{name}": 1 for name in names}
    stats = sum_totals(metrics)
    assert (stats["total_requests"], stats["rejected_requests"]) == totals


async def test_a_request_whose_client_left_counts_only_as_abandoned() -> None:
    metrics = Metrics()
    await ask(metrics, "/rerank", ClientGoneError)
    assert nonzero_counts(metrics) == {"embedder_abandoned_requests_total": 1}


def test_every_rejection_reason_has_an_error() -> None:
    assert set(REJECTED.values()) == set(REJECTION_REASONS)
