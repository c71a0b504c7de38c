"""A full queue and a drain, as the clients of other APIs are told of them."""

from concurrent.futures import ThreadPoolExecutor

import httpx2

NATIVE = ("/embeddings/", {"sentences": ["a"]})
REQUESTS = [
    NATIVE,
    ("/v1/embeddings", {"input": "a"}),
    ("/embeddings", {"input": "a"}),
    ("/v2/embed", {"texts": ["a"]}),
    ("/embed", {"inputs": "a"}),
    ("/api/v1/embed", {"inputs": "a"}),
]
OVERLOADED = {"/embed": 429, "/api/v1/embed": 429}
RERANKS = [
    ("/rerank", {"query": "a", "documents": ["a"]}),
    ("/rerank", {"query": "a", "texts": ["a"]}),
    ("/score", {"text_1": "a", "text_2": "a"}),
]


def message_of(answer: httpx2.Response) -> str:
    """Wherever the client of that path looks for it."""
    body = answer.json()
    error = body.get("error")
    if isinstance(error, dict):
        return error["message"]
    return error or body.get("message") or body["detail"]


def post(client: httpx2.Client, path: str, body: dict) -> httpx2.Response:
    return client.post(path, json=body)


def test_each_client_is_told_in_its_own_shape_and_may_try_again(faulty_server, open_gate) -> None:
    """Sent 17: answered 2, refused 15 (6 queue_full, 9 draining), lost 0."""
    with (
        faulty_server(FAULTS="1:hold", MAX_QUEUE_SIZE="1") as server,
        ThreadPoolExecutor(2) as threads,
        server.client() as client,
        server.client() as first,
        server.client() as second,
    ):
        held = threads.submit(post, first, *NATIVE)
        server.wait_for_metric("embedder_queue_wait_seconds_count", 1)
        waiting = threads.submit(post, second, *NATIVE)
        server.wait_for_metric("embedding_queue_size", 1)
        for path, body in REQUESTS:
            answer = post(client, path, body)
            assert answer.status_code == OVERLOADED.get(path, 503), path
            assert int(answer.headers["retry-after"]) >= 1
            assert "MAX_QUEUE_SIZE" in message_of(answer)
        rejected = server.metric('embedding_requests_rejected_total{reason="backpressure"}')
        assert rejected == len(REQUESTS)
        server.process.terminate()
        server.wait_for_status("/health", 503)
        for path, body in REQUESTS + RERANKS:
            answer = post(client, path, body)
            assert answer.status_code == 503, path
            assert int(answer.headers["retry-after"]) >= 1
            assert "shutting down" in message_of(answer)
        open_gate()
        assert (held.result().status_code, waiting.result().status_code) == (200, 200)
        assert server.process.wait(30) == 0
