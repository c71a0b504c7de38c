"""EMBEDDING_CACHE: answers are those of a service that keeps nothing."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.api.conftest import answered, metric, serving
from tests.support.streaming import NDJSON
from tests.support.texts import varied_texts

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
def cached(tiny_m3):
    settings = {"bge_embed_max_length": 60, "embedding_cache": "memory"}
    with serving(embedding_model=str(tiny_m3), **settings) as client:
        yield client


def ask(cached, texts, **options) -> dict:
    return answered(cached, "/embeddings/", sentences=texts, **options)


def tokens(cached) -> float:
    return metric(cached, "embedder_tokens_processed_total", model="tiny-m3")


def marked(texts, mark) -> list[str]:
    """Texts that no other test has asked for."""
    return [f"{mark} {text}" for text in texts]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_an_answer_that_was_found_is_the_one_that_was_computed(cached, options) -> None:
    texts = marked(TEXTS, f"found {options}")
    computed = ask(cached, texts, **options)
    before = tokens(cached)
    found = ask(cached, texts, **options)
    assert tokens(cached) == before
    times, were = found.pop("timings_ms"), computed.pop("timings_ms")
    assert times.keys() == were.keys()
    assert times["inference"] == times["tokenize"] == 0
    for answer in (found, computed):
        del answer["processing_time_ms"]
    assert found == computed
    assert {each["code"] for each in found["warnings"]} == {"input_truncated"}
    assert 0 < metric(cached, "embedder_cache_bytes") <= 2**28


def test_a_stream_and_requests_beside_it_answer_the_same(cached) -> None:
    texts = marked(varied_texts(30), "beside")
    lines = b"".join(json.dumps(text).encode() + b"\n" for text in texts)
    stream = partial(
        cached.post, "/embeddings/stream", content=lines, headers={"Content-Type": NDJSON}
    )
    with ThreadPoolExecutor(4) as threads:
        streams = [threads.submit(stream) for _ in range(2)]
        requests = [threads.submit(ask, cached, texts[i::2]) for i in range(2)]
        items = [item for each in requests for item in each.result()["data"]]
    asked = {item["text"]: item["embeddings"] for item in items}
    # An urgent request computes what it would otherwise wait for, so bits may differ by rounding.
    for each in streams:
        for text, record in zip(texts, each.result().content.splitlines(), strict=True):
            made = json.loads(record)["embeddings"]
            assert made["dense"] == pytest.approx(asked[text]["dense"], abs=1e-5)
            assert made["sparse"].keys() == asked[text]["sparse"].keys()
