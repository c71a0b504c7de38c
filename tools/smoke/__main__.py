"""`python -m tools.smoke --url URL --token TOKEN`: does a running server answer as documented?

Sends a few dozen requests, prints a line for each check and then how many passed, and exits
with 1 where one failed. Where the rate limit refuses a request, it waits as long as that says. It
knows only what a client can see, and changes nothing.
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
WORD, LONGEST = "search ", 8192
SPARSE = {"return_dense": False, "return_colbert": False}
LEAST_COSINE, HALF_PRECISION = 0.999, 0.02
# The series of /metrics that are added up.
TOTALS = {
    "total_requests": "embedding_requests_total|rerank_requests_total",
    "total_sentences": "embedding_sentences_processed_total",
    "total_batches": "embedding_batch_size_count",
    "rejected_requests": "embedding_requests_rejected_total|rerank_requests_rejected_total",
}
# No answer, a wrong one, and one of another shape.
FAILURES = httpx2.HTTPError, ServiceError, AssertionError, LookupError, TypeError, ValueError


def expect(what: str, seen: object, expected: object) -> None:
    """Raise `AssertionError` unless both are equal."""
    if seen != expected:
        raise AssertionError(f"{what}: expected {expected!r:.300}, saw {seen!r:.300}")


def expect_error(answer: httpx2.Response, status: int, code: str) -> None:
    """Raise unless it is an error of this status and code, in the shape that all errors have."""
    error = answer.json()
    expect("status and code", (answer.status_code, error.get("code")), (status, code))
    expect("its request_id", error["request_id"], answer.headers["x-request-id"])


def embed(service: Service, texts: list[str], **options: bool) -> Any:
    """The answer to texts; raises `ServiceError` where they are refused."""
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
    """Without a token, or with a wrong one, work is 401 with WWW-Authenticate: Bearer."""
    if not service.token:
        raise SkipTest("no token was given")
    for token in ("", "wrong-wrong"):
        answer = service.post(EMBED, {"sentences": []}, token=token)
        expect_error(answer, 401, "unauthorized")
        expect("WWW-Authenticate", answer.headers.get("www-authenticate"), "Bearer")


def check_errors(service: Service) -> None:
    """Empty input is 400, a malformed body 422, an unknown path 404, all in one shape."""
    answer = service.post(EMBED, {"sentences": []}, headers={"X-Request-ID": "smoke-1"})
    expect_error(answer, 400, "empty_input")
    expect("X-Request-ID", answer.headers["x-request-id"], "smoke-1")
    expect_error(service.post(EMBED, b"{no json"), 422, "invalid_request")
    expect_error(service.post(EMBED, {"sentences": ["a"], "unknown": 1}), 422, "invalid_request")
    expect_error(service.get("/no/such/page"), 404, "not_found")


def check_embedding(service: Service) -> None:
    """One request gives dense, sparse and ColBERT vectors of each text, in the texts' order."""
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
    """A text has the same vector alone and among others, and no kind that is not asked for."""
    options = {"normalize_dense": True, "return_sparse": False, "return_colbert": False}
    answers = [embed(service, texts, **options) for texts in (TEXTS[:1], [*TEXTS, WORD * 20])]
    alone, among = (answer["data"][0]["embeddings"] for answer in answers)
    expect("other kinds", (alone["sparse"], alone["colbert"]), (None, None))
    cosine = sum(a * b for a, b in zip(alone["dense"], among["dense"], strict=True))
    expect(f"cosine {cosine} above {LEAST_COSINE}", cosine > LEAST_COSINE, True)


def check_truncation(service: Service) -> None:
    """A text longer than the model reads is cut, and the warning says by how much."""
    longest = service.health["max_input_length"]
    if longest > LONGEST:
        raise SkipTest(f"it would take a text of more than {LONGEST} tokens")
    # Two short texts show how many tokens a word has, and how many there are besides words.
    few, more = (embed(service, [WORD * n], **SPARSE)["usage"]["prompt_tokens"] for n in (1, 5))
    original = few + (longest - 1) * (more - few) // 4
    cut = {"max_tokens": longest, "original_tokens": original, "truncation_side": "end"}
    warnings = embed(service, [TEXTS[0], WORD * longest], **SPARSE)["warnings"]
    told = [(warning["code"], warning["target"]["pointer"]) for warning in warnings]
    expect("warnings", told, [("input_truncated", "/sentences/1")])
    expect("details", {key: warnings[0]["details"][key] for key in cut}, cut)


def check_reranking(service: Service) -> None:
    """Every passage comes back once, by falling score; equal scores keep the request's order."""
    if service.health["reranker_model"] == "none":
        expect_error(service.post(RERANK, PAIRS), 503, "reranker_disabled")
        raise SkipTest("RERANKER_MODEL is none")
    results = service.work(RERANK, PAIRS).json()["results"]
    order = [(-result["score"], result["index"]) for result in results]
    expect("scores and indices", order, sorted(order))
    passages = {result["index"]: result["passage"] for result in results}
    expect("passages", passages, dict(enumerate(PAIRS["passages"])))


def check_stats(service: Service) -> None:
    """/stats says the same as /metrics."""
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
    """Check the server that the arguments name; the exit status."""
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
        counts = Counter(run(check, service) for check in CHECKS)
    tried = counts["ok"] + counts["FAILED"]
    print(f"\n{counts['ok']} of {tried} passed, {counts['skipped']} skipped.")
    return 1 if counts["FAILED"] else 0


def run(check: Callable[[Service], None], service: Service) -> str:
    """Run and print a check: `ok`, `FAILED` or `skipped`."""
    outcome, why = "ok", ""
    try:
        check(service)
    except SkipTest as reason:
        outcome, why = "skipped", f" ({reason})"
    except FAILURES as error:
        outcome, why = "FAILED", f" ({type(error).__name__}: {error!s:.300})"
    print(f"{outcome:8}{(check.__doc__ or '').rstrip('.')}{why}", flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
