"""The checks: what operators see, what is refused, vectors, truncated texts, and rankings."""

import math
import re
from http import HTTPStatus
from typing import Any

from smart_embedder.api.answers import HealthResponse, StatsResponse
from smart_embedder.settings import NO_RERANKER
from tools.service import EMBED, RERANK, describe
from tools.smoke.target import (
    TOLERANCE,
    Access,
    Skip,
    Target,
    expect,
    expect_that,
    read_error,
)

_TOTALS = {
    "total_requests": ("embedding_requests_total", "rerank_requests_total"),
    "total_sentences": ("embedding_sentences_processed_total",),
    "total_batches": ("embedding_batch_size_count",),
    "rejected_requests": ("embedding_requests_rejected_total", "rerank_requests_rejected_total"),
}
_WRONG = "wrong-" * 4
_TEXTS = ["What is hybrid search?", "A recipe for bread."]
_WORD = "search "
_LONGEST = 8192
_MIN_COSINE = 0.999
_SPARSE_ALONE = {"return_dense": False, "return_colbert": False}
_PASSAGES = [
    "A recipe for bread.",
    "Hybrid search joins meaning and exact words in one ranking.",
    "A recipe for bread.",
    "The sea in winter.",
]
_BODY: dict[str, Any] = {"query": _TEXTS[0], "passages": _PASSAGES}
_REFUSED: tuple[tuple[str, Any, int, str], ...] = (
    (EMBED, {"sentences": []}, 400, "empty_input"),
    (EMBED, b"{no json", 422, "invalid_request"),
    (EMBED, {"sentences": ["a"], "unknown": 1}, 422, "invalid_request"),
    (RERANK, _BODY | {"query": "  "}, 400, "empty_input"),
)


def health_tells_the_state(target: Target) -> None:
    """/health is 200 exactly where it says healthy, and describes models, limits and hardware."""
    answer = target.get("/health")
    health = HealthResponse.model_validate_json(answer.content, strict=True)
    expect("its status", answer.status_code, 200 if health.status == "healthy" else 503)
    told = health.status == "healthy" or health.reason
    expect_that("the reason", told, "a sentence", health.reason)


def service_is_healthy(target: Target) -> None:
    """The service is healthy: its models are warm, and it is not shutting down."""
    state = f"{target.health['status']}: {target.health.get('reason')}"
    expect_that("status", target.healthy, "healthy", state)


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
    refused = answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    expect_that(f"POST {EMBED}", refused, 503, describe(answer))
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


def stats_agree_with_metrics(target: Target) -> None:
    """/stats says the same as /metrics."""
    before = target.metrics()
    answer = target.get("/stats")
    after = target.metrics()
    expect("GET /stats", answer.status_code, 200)
    stats = StatsResponse.model_validate_json(answer.content, strict=True)
    for total, names in _TOTALS.items():
        seen = getattr(stats, total)
        low, high = (sum(each[name] for name in names) for each in (before, after))
        expected = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        expect_that(total, low <= seen <= high, expected, seen)


def wrong_requests_are_refused(target: Target) -> None:
    """What is empty is 400, what is malformed 422, in the one shape of errors."""
    for path, body, status, code in _REFUSED:
        expect("the code", target.refused(path, body, status).code, code)


def unknown_path_is_404(target: Target) -> None:
    """An unknown path is 404 in the one shape of errors."""
    answer = target.get("/no/such/page")
    target.require_access(answer)
    expect("the status", answer.status_code, 404)
    read_error(answer)


def missing_or_wrong_token_is_401(target: Target) -> None:
    """Without a token, or with a wrong one, work is 401 with WWW-Authenticate: Bearer."""
    if target.access is Access.OPEN and not target.token:
        raise Skip("no token is asked for")
    for token in ("", _WRONG):
        # Empty: a service that asks for no token then does no work.
        answer = target.post(EMBED, {"sentences": []}, token=token)
        note = " (a token was given, and this service asks for none)"
        expected = f"401{note if target.access is Access.OPEN else ''}"
        refused = answer.status_code == HTTPStatus.UNAUTHORIZED
        expect_that("the status", refused, expected, describe(answer))
        expect("WWW-Authenticate", answer.headers.get("www-authenticate"), "Bearer")
        expect("the code", read_error(answer).code, "unauthorized")


def token_opens_the_service(target: Target) -> None:
    """The token that was given opens the service; where none was, none is asked for."""
    opened = target.access in {Access.OPEN, Access.GRANTED}
    expect_that("the service", opened, "an answer", str(target.access))


def health_is_public(target: Target) -> None:
    """/health and the docs ask for no token."""
    if not target.token:
        raise Skip("no token was given")
    token, target.token = target.token, None
    try:
        statuses = {page: target.get(page).status_code for page in ("/health", "/docs")}
    finally:
        target.token = token
    refused = [page for page, status in statuses.items() if status == HTTPStatus.UNAUTHORIZED]
    expect("pages that ask for one", refused, [])


def request_id_is_the_clients(target: Target) -> None:
    """The client's own X-Request-ID comes back, and every answer carries one."""
    answer = target.post(EMBED, {"sentences": []}, headers={"X-Request-ID": "smoke-check-1"})
    expect("X-Request-ID", answer.headers.get("x-request-id"), "smoke-check-1")
    expect("answers without one", target.without_id, [])


def refusals_say_when_to_come_again(target: Target) -> None:
    """Every 429 and 503 of this run that may pass carried a Retry-After in whole seconds."""
    if not target.refusals:
        raise Skip("there was none")
    expect("those without one", target.without_retry_after, [])


def answer_is_complete(target: Target) -> None:
    """An answer names its models, tokens and times, and gives each text back in its place."""
    answer = target.embed(_TEXTS)
    expect("model_name", answer.model_name, answer.dense_model_name)
    expect("dense_model_name", answer.dense_model_name, target.health["dense_embedding_model"])
    expect("sparse_model_name", answer.sparse_model_name, target.health["model"])
    expect("warnings", answer.warnings, [])
    expect("texts", [(item.id, item.text) for item in answer.data], list(enumerate(_TEXTS)))
    usage = answer.usage
    expect("total_tokens", usage.total_tokens, usage.prompt_tokens)
    expect_that("prompt_tokens", usage.prompt_tokens > len(_TEXTS), "tokens", usage)


def three_kinds_come_together(target: Target) -> None:
    """One request gives dense, sparse and ColBERT vectors, and none that is not asked for."""
    for item in target.embed(_TEXTS).data:
        found = item.embeddings
        expect_that("dense", found.dense, "numbers", found.dense)
        weights = found.sparse if isinstance(found.sparse, dict) else {}
        expect_that("sparse", weights and min(weights.values()) > 0, "weights above 0", weights)
        for vector in found.colbert or [[]]:
            _expect_unit("a ColBERT vector", vector)
    alone = target.embed(_TEXTS[:1], **_SPARSE_ALONE).data[0].embeddings
    given = alone.model_dump(include={"dense", "colbert"}, exclude_none=True)
    expect("what was not asked for", given, {})


def dense_has_unit_length(target: Target) -> None:
    """The dense vector has unit length with normalize_dense, and bge-m3's without it, too."""
    _expect_unit("dense", _dense(target, _TEXTS[:1], normalize_dense=True))
    if target.health["model"] != target.health["dense_embedding_model"]:
        raise Skip("another model makes the dense vectors")
    _expect_unit("dense", _dense(target, _TEXTS[:1]))


def colbert_has_a_vector_for_each_token(target: Target) -> None:
    """ColBERT has one vector for each token but the first."""
    answer = target.embed(_TEXTS[:1], return_dense=False, return_sparse=False)
    vectors = answer.data[0].embeddings.colbert or []
    expect("number of vectors", len(vectors), answer.usage.prompt_tokens - 1)


def other_texts_change_nothing(target: Target) -> None:
    """A text has the same vector alone and among others."""
    alone, among = (
        _dense(target, texts, normalize_dense=True)
        for texts in (_TEXTS[:1], [*_TEXTS, "Others", "more words " * 9])
    )
    cosine = math.fsum(a * b for a, b in zip(alone, among, strict=True))
    expect_that("their cosine", cosine > _MIN_COSINE, f"above {_MIN_COSINE}", cosine)


def long_texts_are_cut_and_reported(target: Target) -> None:
    """A text longer than the model reads is cut, and the warning counts its tokens exactly."""
    target.require_healthy()
    max_tokens = target.health["max_input_length"]
    if max_tokens > _LONGEST:
        raise Skip(f"it would take a text of more than {_LONGEST} tokens")

    def count(text: str) -> int:
        return target.embed([text], **_SPARSE_ALONE).usage.prompt_tokens

    # Two short texts show how many tokens a word has, and how many there are besides words.
    few, more = (count(_WORD * words) for words in (1, 5))
    original = int(few + (max_tokens - 1) * (more - few) / 4)
    answer = target.embed([_TEXTS[0], _WORD * max_tokens], **_SPARSE_ALONE)
    expect("number of warnings", len(answer.warnings), 1)
    for name, expected in {
        "code": "input_truncated",
        "severity": "warning",
        "target": {"field": "sentences", "index": 1, "pointer": "/sentences/1"},
        "details": {
            "model": answer.sparse_model_name,
            "max_tokens": max_tokens,
            "original_tokens": original,
            "truncated_tokens": original - max_tokens,
            "truncation_side": "end",
        },
    }.items():
        expect(name, answer.warnings[0].model_dump(exclude_none=True)[name], expected)
    expect("prompt_tokens", answer.usage.prompt_tokens, count(_TEXTS[0]) + max_tokens)


def _expect_unit(what: str, vector: list[float]) -> None:
    """As far as half precision goes."""
    length = math.hypot(*vector)
    expect_that(what, abs(length - 1) < TOLERANCE, "length 1", f"length {length:.4f}")


def _dense(target: Target, texts: list[str], **options: bool) -> list[float]:
    """The first text's dense vector."""
    answer = target.embed(texts, return_sparse=False, return_colbert=False, **options)
    return answer.data[0].embeddings.dense or []


def rerank_orders_by_falling_score(target: Target) -> None:
    """Every passage comes back once, by falling score; equal scores keep the request's order."""
    if target.health["reranker_model"] == NO_RERANKER:
        raise Skip("RERANKER_MODEL is none")
    answer = target.rerank(**_BODY)
    expect("warnings", answer.warnings, [])
    scores = [result.score for result in answer.results]
    order = [(-result.score, result.index) for result in answer.results]
    expect_that("scores", order == sorted(order), "falling, equal ones in order", scores)
    indices = [result.index for result in answer.results]
    expect("indices", sorted(indices), list(range(len(_PASSAGES))))
    passages = [result.passage for result in answer.results]
    expect("passages", passages, [_PASSAGES[index] for index in indices])


def disabled_reranker_is_503(target: Target) -> None:
    """With RERANKER_MODEL=none, reranking is 503 and says so."""
    if target.health["reranker_model"] != NO_RERANKER:
        raise Skip("there is a reranker")
    expect("the code", target.refused(RERANK, _BODY, 503).code, "reranker_disabled")


CHECKS = (
    health_tells_the_state,
    service_is_healthy,
    probes_answer,
    unready_service_refuses_work,
    docs_need_no_internet,
    token_opens_the_service,
    missing_or_wrong_token_is_401,
    health_is_public,
    wrong_requests_are_refused,
    unknown_path_is_404,
    answer_is_complete,
    three_kinds_come_together,
    dense_has_unit_length,
    colbert_has_a_vector_for_each_token,
    other_texts_change_nothing,
    long_texts_are_cut_and_reported,
    rerank_orders_by_falling_score,
    disabled_reranker_is_503,
    request_id_is_the_clients,
    refusals_say_when_to_come_again,
    stats_agree_with_metrics,
)
