"""EMBEDDING_CACHE in real server processes: answers are those of a service that keeps nothing."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.server import RunningServer, run_server
from tests.support.streaming import NDJSON
from tests.support.texts import varied_texts

TOKENS = 'embedder_tokens_processed_total{model="tiny-m3"}'
LONG = "search " * 100
TEXTS = list(dict.fromkeys([*varied_texts(6), LONG, "", "search"]))
VARIANTS = [
    {},
    {"return_colbert": False, "sparse_as_indices": True},
    {"return_dense": False, "return_tokens": True},
    {"truncation_side": "left"},
    {"output_dtype": "int8", "return_sparse": False},
    {"muvera": "document"},
]


@pytest.fixture(scope="module")
def cached(tiny_m3, tmp_path_factory):
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "BGE_EMBED_MAX_LENGTH": "60"}
    folder = tmp_path_factory.mktemp("cached")
    with run_server(folder, EMBEDDING_CACHE="memory", **settings) as running:
        running.wait_until_healthy()
        yield running


def ask(server: RunningServer, texts, **options) -> dict:
    with server.client() as client:
        answer = client.post("/embeddings/", json={"sentences": texts, **options})
    assert answer.status_code == 200, answer.text
    return answer.json()


def without_times(answer: dict) -> dict:
    return {k: v for k, v in answer.items() if k not in {"timings_ms", "processing_time_ms"}}


def marked(texts, mark) -> list[str]:
    """Texts that no other test has asked for."""
    return [f"{mark} {text}" for text in texts]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_an_answer_that_was_found_is_the_one_that_was_computed(cached, options) -> None:
    texts = marked(TEXTS, f"found {options}")
    computed = ask(cached, texts, **options)
    before = cached.metric(TOKENS)
    found = ask(cached, texts, **options)
    assert cached.metric(TOKENS) == before
    assert without_times(found) == without_times(computed)
    assert found["timings_ms"].keys() == computed["timings_ms"].keys()
    assert found["timings_ms"]["inference"] == found["timings_ms"]["tokenize"] == 0
    assert {each["code"] for each in found["warnings"]} == {"input_truncated"}


def test_known_and_new_texts_in_one_request_are_answered_as_alone(cached) -> None:
    texts = marked(TEXTS, "mixed")
    known = {text: ask(cached, [text])["data"][0]["embeddings"] for text in texts[::2]}
    before = cached.metric(TOKENS)
    mixed = ask(cached, [*texts, texts[1]])
    new = mixed["usage"]["total_tokens"] - sum(
        ask(cached, [text])["usage"]["total_tokens"] for text in [*known, texts[1]]
    )
    assert cached.metric(TOKENS) - before == new
    for item in mixed["data"]:
        alone = ask(cached, [item["text"]])["data"][0]["embeddings"]
        assert item["embeddings"] == alone == known.get(item["text"], alone)
    assert [cut["target"]["index"] for cut in mixed["warnings"]] == [6]


def test_a_stream_and_requests_beside_it_answer_the_same(cached) -> None:
    texts = marked(varied_texts(30), "beside")
    lines = b"".join(json.dumps(text).encode() + b"\n" for text in texts)

    def stream() -> list[dict]:
        with cached.client() as client:
            answer = client.post(
                "/embeddings/stream", content=lines, headers={"Content-Type": NDJSON}
            )
        return [json.loads(line) for line in answer.content.splitlines()]

    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(stream) for _ in range(2)]
        requests = [threads.submit(ask, cached, texts[i::2]) for i in range(2)]
        streamed = [each.result() for each in streams]
        asked = {
            item["text"]: item["embeddings"] for each in requests for item in each.result()["data"]
        }
    # An urgent request computes what it would otherwise wait for, so bits may differ by rounding.
    for records in streamed:
        for text, record in zip(texts, records, strict=True):
            made = record["embeddings"]
            assert made["dense"] == pytest.approx(asked[text]["dense"], abs=1e-5)
            assert made["sparse"].keys() == asked[text]["sparse"].keys()


def test_texts_are_in_no_log_and_the_bytes_in_the_metrics(cached) -> None:
    ask(cached, ["a confidential text"])
    assert "confidential" not in cached.log
    assert 0 < cached.metric("embedder_cache_bytes") <= 2**28
    answer = cached.get("/metrics").text
    assert "confidential" not in answer
