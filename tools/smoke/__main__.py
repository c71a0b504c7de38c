"""`python -m tools.smoke --url URL --token TOKEN`: check that a running server works as documented.

Sends a few dozen requests as a client, prints a line for each check and the number of checks that
passed, and exits with 1 if one failed. It waits if the rate limit refuses a request, and changes
nothing on the server.
"""

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any
from unittest import SkipTest

import httpx2

from tools.service import EMBED, RERANK, Service, ServiceError, add_server

TEXTS = ["What is hybrid search?", "A recipe for bread."]
PAIRS = {"query": TEXTS[0], "passages": [TEXTS[1], "Hybrid search joins words.", TEXTS[1]]}
WORD, MAX_LENGTH = "search ", 8192
SPARSE = {"return_dense": False, "return_colbert": False}
MIN_COSINE, HALF_PRECISION = 0.999, 0.02
# The series of /metrics whose sum is each total of /stats.
TOTALS = {
    "total_requests": "embedding_requests_total|rerank_requests_total",
    "total_sentences": "embedding_sentences_processed_total",
    "total_batches": "embedding_batch_size_count",
    "rejected_requests": "embedding_requests_rejected_total|rerank_requests_rejected_total",
}
# No response, a wrong one, and one of another shape.
FAILURES = httpx2.HTTPError, ServiceError, AssertionError, LookupError, TypeError, ValueError


def expect(name: str, seen: object, expected: object) -> None:
    """Raise `AssertionError` unless both are equal."""
    if seen != expected:
        raise AssertionError(f"{name}: expected {expected!r:.300}, saw {seen!r:.300}")


def expect_error(answer: httpx2.Response, status: int, code: str) -> None:
    """Raise unless the response is an error with this status and code, in the usual form."""
    error = answer.json()
    expect("status and code", (answer.status_code, error.get("code")), (status, code))
    expect("its request_id", error["request_id"], answer.headers["x-request-id"])


def embed(service: Service, texts: list[str], **options: bool) -> Any:
    """Embed texts; raise `ServiceError` if they are refused."""
    return service.work(EMBED, {"sentences": texts, **options}).json()


def check_health(service: Service) -> None:
    """/health, /health/ready and /health/live are 200."""
    for path in ("/health", "/health/ready", "/health/live"):
        expect(path, service.get(path).status_code, 200)


def check_docs(service: Service) -> None:
    """/docs and /redoc load everything from this server."""
    for page in ("/docs", "/redoc"):
        html = service.get(page).text
        expect(f"addresses elsewhere in {page}", re.findall(r"https?://[^\s\"'<]+", html), [])
        files = re.findall(r"""(?:src|href)=["']([^"']+)["']""", html) or ["a script"]
        statuses = {file: service.get(file, "HEAD").status_code for file in files}
        expect(f"files of {page}", statuses, dict.fromkeys(files, 200))


def check_token(service: Service) -> None:
    """A request for work without a token, or with a wrong one, is 401 with WWW-Authenticate."""
    if not service.token:
        raise SkipTest("no token was given")
    for token in ("", "wrong-wrong"):
        answer = service.post(EMBED, {"sentences": []}, token=token)
        expect_error(answer, 401, "unauthorized")
        expect("WWW-Authenticate", answer.headers.get("www-authenticate"), "Bearer")


def check_errors(service: Service) -> None:
    """Empty input is 400, a malformed body 422, an unknown path 404, all in one form."""
    answer = service.post(EMBED, {"sentences": []}, headers={"X-Request-ID": "smoke-1"})
    expect_error(answer, 400, "empty_input")
    expect("X-Request-ID", answer.headers["x-request-id"], "smoke-1")
    expect_error(service.post(EMBED, b"{no json"), 422, "invalid_request")
    expect_error(service.post(EMBED, {"sentences": ["a"], "unknown": 1}), 422, "invalid_request")
    expect_error(service.get("/no/such/page"), 404, "not_found")


def check_embedding(service: Service) -> None:
    """One request returns dense, sparse and ColBERT vectors of each text, in the texts' order."""
    answer = embed(service, TEXTS, normalize_dense=True)
    expect("texts", [(item["id"], item["text"]) for item in answer["data"]], [*enumerate(TEXTS)])
    expect("model_name", answer["model_name"], service.health["dense_embedding_model"])
    expect("warnings", answer["warnings"], [])
    embeddings = [item["embeddings"] for item in answer["data"]]
    count = sum(len(vectors["colbert"]) for vectors in embeddings)
    tokens = embed(service, TEXTS, return_dense=False)["usage"]["prompt_tokens"]
    expect("ColBERT vectors, one for each token but the first", count, tokens - len(TEXTS))
    for vectors in embeddings:
        for vector in (vectors["dense"], *vectors["colbert"]):
            expect("unit length", abs(math.hypot(*vector) - 1) < HALF_PRECISION, True)
        expect("sparse weights above 0", min(vectors["sparse"].values(), default=0) > 0, True)


def check_sameness(service: Service) -> None:
    """A text has the same vector alone and in a batch, and no kind that was not requested."""
    options = {"normalize_dense": True, "return_sparse": False, "return_colbert": False}
    answers = [embed(service, texts, **options) for texts in (TEXTS[:1], [*TEXTS, WORD * 20])]
    alone, in_batch = (answer["data"][0]["embeddings"] for answer in answers)
    expect("other kinds", (alone["sparse"], alone["colbert"]), (None, None))
    cosine = sum(a * b for a, b in zip(alone["dense"], in_batch["dense"], strict=True))
    expect(f"cosine {cosine} above {MIN_COSINE}", cosine > MIN_COSINE, True)


def check_truncation(service: Service) -> None:
    """A text longer than the model's limit is truncated, and the warning has the numbers."""
    limit = service.health["max_input_length"]
    if limit > MAX_LENGTH:
        raise SkipTest(f"it would take a text of more than {MAX_LENGTH} tokens")
    # Two short texts show how many tokens a word has, and how many special tokens there are.
    few, more = (embed(service, [WORD * n], **SPARSE)["usage"]["prompt_tokens"] for n in (1, 5))
    original = few + (limit - 1) * (more - few) // 4
    details = {"max_tokens": limit, "original_tokens": original, "truncation_side": "end"}
    warnings = embed(service, [TEXTS[0], WORD * limit], **SPARSE)["warnings"]
    seen = [(warning["code"], warning["target"]["pointer"]) for warning in warnings]
    expect("warnings", seen, [("input_truncated", "/sentences/1")])
    expect("details", {key: warnings[0]["details"][key] for key in details}, details)


def check_reranking(service: Service) -> None:
    """Each passage is returned once, the best first; equal scores keep the request's order."""
    if service.health["reranker_model"] == "none":
        expect_error(service.post(RERANK, PAIRS), 503, "reranker_disabled")
        raise SkipTest("RERANKER_MODEL is none")
    results = service.work(RERANK, PAIRS).json()["results"]
    order = [(-result["score"], result["index"]) for result in results]
    expect("scores and indices", order, sorted(order))
    passages = {result["index"]: result["passage"] for result in results}
    expect("passages", passages, dict(enumerate(PAIRS["passages"])))


def check_stats(service: Service) -> None:
    """/stats has the totals of /metrics."""
    before, stats, after = (service.get(path) for path in ("/metrics", "/stats", "/metrics"))
    for total, names in TOTALS.items():
        samples = re.compile(rf"^(?:{names})(?:{{.*}})? (\S+)$", re.MULTILINE)
        low, high = (sum(map(float, samples.findall(page.text))) for page in (before, after))
        seen = stats.json()[total]
        expect(f"{total} {seen} from {low:g} to {high:g}", low <= seen <= high, True)


CHECKS = (
    check_health,
    check_docs,
    check_token,
    check_errors,
    check_embedding,
    check_sameness,
    check_truncation,
    check_reranking,
    check_stats,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the server that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.smoke", description=__doc__)
    add_server(parser)
    options = parser.parse_args(arguments)
    with closing(Service(options.url, options.token, options.timeout)) as service:
        try:
            service.require_ready()
        except ServiceError as error:
            print(f"Nothing was checked: {error}", file=sys.stderr)
            return 1
        print(f"Smart Embedder {service.health['version']} at {service.url}")
        counts = Counter(run_check(check, service) for check in CHECKS)
    total = counts["ok"] + counts["FAILED"]
    print(f"\n{counts['ok']} of {total} passed, {counts['skipped']} skipped.")
    return 1 if counts["FAILED"] else 0


def run_check(check: Callable[[Service], None], service: Service) -> str:
    """Run a check, print its line and return its outcome: `ok`, `FAILED` or `skipped`."""
    outcome, reason = "ok", ""
    try:
        check(service)
    except SkipTest as skip:
        outcome, reason = "skipped", f" ({skip})"
    except FAILURES as error:
        outcome, reason = "FAILED", f" ({type(error).__name__}: {error!s:.300})"
    print(f"{outcome:8}{(check.__doc__ or '').rstrip('.')}{reason}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
