"""Checks of the pages for operators: health, documentation, metrics and totals."""

import re
from http import HTTPStatus

from smart_embedder.api.answers import HealthResponse, StatsResponse
from tools.smoke.target import (
    EMBED,
    RERANK,
    Skip,
    Target,
    describe,
    expect,
    expect_that,
    read_error,
)

_SERIES = [
    "embedding_requests_total",
    "embedding_requests_rejected_total",
    "embedding_sentences_processed_total",
    "rerank_requests_total",
    "rerank_requests_rejected_total",
    "rerank_pairs_processed_total",
    "embedding_request_duration_seconds_count",
    "embedding_batch_size_count",
    "embedding_gpu_inference_duration_seconds_count",
    "rerank_request_duration_seconds_count",
    "rerank_inference_duration_seconds_count",
    "embedding_queue_size",
    "embedding_active_requests",
    "rerank_active_requests",
    "embedding_gpu_memory_allocated_bytes",
    "embedding_gpu_memory_reserved_bytes",
    "gpu_memory_allocated_bytes",
    "gpu_memory_reserved_bytes",
    "gpu_memory_free_bytes",
    "gpu_memory_total_bytes",
    "embedding_server_info",
    "embedder_batch_tokens_count",
    "embedder_queue_wait_seconds_count",
    "embedder_tokenize_seconds_count",
    "embedder_out_of_memory_splits_total",
    "embedder_abandoned_requests_total",
]
_TOTALS = {
    "total_requests": ("embedding_requests_total", "rerank_requests_total"),
    "total_sentences": ("embedding_sentences_processed_total",),
    "total_batches": ("embedding_batch_size_count",),
    "rejected_requests": ("embedding_requests_rejected_total", "rerank_requests_rejected_total"),
}
_STATES = {"loading", "draining", "unhealthy"}


def health_tells_the_state(target: Target) -> None:
    """/health is 200 exactly where it says healthy, and gives a reason where it does not."""
    answer = target.get("/health")
    body = answer.json()
    if body["status"] == "healthy":
        expect("its status", answer.status_code, 200)
        return
    expect("its status", answer.status_code, 503)
    expect_that("the state", body["status"] in _STATES, f"one of {sorted(_STATES)}", body["status"])
    expect_that("the reason", body.get("reason"), "a sentence", body.get("reason"))


def service_is_healthy(target: Target) -> None:
    """The service is healthy: its models are warm, and it is not shutting down."""
    expect_that(
        "status",
        target.healthy,
        "healthy",
        f"{target.health['status']}: {target.health.get('reason')}",
    )


def health_describes_the_service(target: Target) -> None:
    """/health describes models, limits and hardware."""
    HealthResponse.model_validate_json(target.get("/health").content, strict=True)


def probes_answer(target: Target) -> None:
    """/health/live is 200, and /health/ready says the same as /health."""
    live = target.get("/health/live").status_code
    unhealthy = target.health["status"] == "unhealthy"
    expect_that("/health/live", live == HTTPStatus.OK or unhealthy, 200, live)
    ready, health = target.get("/health/ready"), target.get("/health")
    expect("/health/ready", ready.json()["status"], health.json()["status"])


def unready_service_refuses_work(target: Target) -> None:
    """While loading, draining or unhealthy, work is 503 with that code and a Retry-After."""
    if target.healthy:
        raise Skip("the service is healthy")
    answer = target.post(EMBED, {"sentences": ["hello"]})
    target.require_access(answer)
    expect_that(
        f"POST {EMBED}", answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE, 503, describe(answer)
    )
    expect("the code", read_error(answer).code, target.health["status"])


def docs_need_no_internet(target: Target) -> None:
    """/docs and /redoc load everything from this server."""
    for page in ("/docs", "/redoc"):
        html = target.get(page)
        expect(page, html.status_code, 200)
        addresses = re.findall(r"""(?:src|href)=["']([^"']+)["']""", html.text)
        expect_that(f"what {page} loads", addresses, "scripts", addresses)
        outside = re.findall(r"https?://[^\s\"'<]+", html.text)
        expect(f"addresses elsewhere in {page}", outside, [])
        for address in addresses:
            expect(address, target.get(address, "HEAD").status_code, 200)


def openapi_describes_the_endpoints(target: Target) -> None:
    """/openapi.json describes both POST endpoints, and puts the lock on them."""
    answer = target.get("/openapi.json")
    expect("GET /openapi.json", answer.status_code, 200)
    paths = answer.json()["paths"]
    for path in (EMBED, RERANK):
        expect_that(
            f"security of {path}", bool(paths[path]["post"].get("security")), "a lock", None
        )


def every_series_exists(target: Target) -> None:
    """/metrics holds every series of the contract."""
    expect("missing series", sorted(set(_SERIES) - target.metrics().keys()), [])


def metrics_move(target: Target) -> None:
    """Counters move with a request that succeeds and with one that is wrong."""
    target.require_healthy()
    before = target.metrics()
    target.embed(["one", "two"], return_colbert=False)
    target.refused(EMBED, {"sentences": []}, 400)
    after = target.metrics()
    # Others may use the service meanwhile: at least so many.
    for name, labels, least in (
        ("embedding_requests_total", {"status": "success"}, 1),
        ("embedding_requests_total", {"status": "client_error"}, 1),
        ("embedding_sentences_processed_total", {}, 2),
        ("embedding_request_duration_seconds_count", {}, 1),
        ("embedding_batch_size_count", {}, 1),
        ("embedder_tokens_processed_total", {}, 2),
    ):
        moved = _sum(after, name, labels) - _sum(before, name, labels)
        expect_that(f"{name} {labels or ''}".strip(), moved >= least, f"{least} more", moved)


def stats_agree_with_metrics(target: Target) -> None:
    """/stats says the same as /metrics."""
    before = target.metrics()
    answer = target.get("/stats")
    after = target.metrics()
    expect("GET /stats", answer.status_code, 200)
    stats = StatsResponse.model_validate_json(answer.content, strict=True)
    for total, names in _TOTALS.items():
        seen = getattr(stats, total)
        low, high = (sum(_sum(each, name) for name in names) for each in (before, after))
        expected = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        expect_that(total, low <= seen <= high, expected, seen)


def _sum(
    found: dict[str, list[tuple[dict[str, str], float]]],
    name: str,
    labels: dict[str, str] | None = None,
) -> float:
    expected = (labels or {}).items()
    return sum(value for own, value in found.get(name, []) if expected <= own.items())


CHECKS = (
    health_tells_the_state,
    service_is_healthy,
    health_describes_the_service,
    probes_answer,
    unready_service_refuses_work,
    docs_need_no_internet,
    openapi_describes_the_endpoints,
    every_series_exists,
    metrics_move,
)
LAST_CHECKS = (stats_agree_with_metrics,)
