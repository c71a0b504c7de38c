"""What a real server makes of vectors is what the references make of its float32 answer.

By itself, and in one batch with requests of other options and of other APIs.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings
from smart_embedder_client import Client

from tests.support.server import RunningServer, run_server
from tests.support.texts import varied_texts

TEXTS = [*varied_texts(5), ""]
ALL = {"return_colbert": True}
FEWER = {"colbert_pool_factor": 2, "muvera": "document"}
OPTIONS: list[dict[str, Any]] = [
    *[{"muvera": "query"}, {"muvera": "document", "return_colbert": False}],
    *[{"colbert_pool_factor": factor} for factor in (2, 3)],
    *[{"output_dtype": dtype} for dtype in ("float16", "bfloat16", "int8", "uint8")],
    *[{"output_dtype": "binary"}, {"output_dtype": "ubinary", "return_dense": False}],
    {"output_dtype": "int8", **FEWER},
    {"output_dtype": "ubinary", "colbert_pool_factor": 3, "muvera": "document"},
]
STEPS = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}
# How much the rest of a batch may change a number.
NOISE = 1e-5


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file exists, the device computes nothing."""
    return tmp_path_factory.mktemp("hold") / "hold"


@pytest.fixture(scope="module")
def server(hold: Path, tiny_m3: Path, tmp_path_factory):
    settings = {"EMBEDDING_MODEL": str(tiny_m3), "HOLD": str(hold), "GPU_PROCESS_TIMEOUT": "80"}
    folder = tmp_path_factory.mktemp("answers")
    with run_server(folder, "tests.faults.faulty_server", **settings) as running:
        running.wait_until_healthy()
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with Client(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def whole(client: Client):
    """The answer in float32."""
    return client.embed(TEXTS, **ALL)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_option_is_what_the_references_make_of_the_vectors(
    client, whole, expected, options
) -> None:
    made = client.embed(TEXTS, **(ALL | options))
    assert_made_of(whole, made, options, expected)


def test_in_one_batch_with_other_requests_each_gets_what_it_asked_for(
    server, client, whole, expected, hold
) -> None:
    with ThreadPoolExecutor(len(OPTIONS) + 5) as threads:
        taken = server.metric("embedder_queue_wait_seconds_count")
        hold.touch()
        try:
            first = threads.submit(client.embed, ["first"], **ALL)
            server.wait_for_metric("embedder_queue_wait_seconds_count", taken + 1)
            forwards = server.metric("embedding_batch_size_count")
            asked = [threads.submit(client.embed, TEXTS, **(ALL | each)) for each in OPTIONS]
            plain = threads.submit(client.embed, TEXTS, **ALL)
            openai = threads.submit(openai_answer, server, output_dtype="int8")
            bits = threads.submit(openai_answer, server, embedding_type="ubinary", **FEWER)
            cohere = threads.submit(cohere_answer, server)
            server.wait_for_metric("embedding_queue_size", len(OPTIONS) + 4)
        finally:
            hold.unlink()
        for options, each in zip(OPTIONS, asked, strict=True):
            assert_made_of(whole, each.result(), options, expected)
        assert_made_of(whole, plain.result(), {}, expected)
        assert_made_of(whole, openai.result(), {"output_dtype": "int8"}, expected)
        assert_made_of(whole, bits.result(), {"output_dtype": "ubinary", **FEWER}, expected)
        for dtype, answer in cohere.result().items():
            assert_made_of(whole, answer, {"output_dtype": dtype}, expected)
        assert first.result().dense.shape == (1, whole.dense.shape[1])
    # The first one's, and another for all that waited; not one for each.
    assert server.metric("embedding_batch_size_count") - forwards <= 3


def openai_answer(server: RunningServer, **options: Any) -> SimpleNamespace:
    """OpenAI's API, whose answer holds ColBERT vectors where they are asked for."""
    body = {"input": TEXTS, "return_colbert": True} | options
    answer = httpx2.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    items = answer.json()["data"]
    return SimpleNamespace(
        dense=[np.array(item["embedding"]) for item in items],
        dense_scale=[item.get("scale") for item in items],
        colbert=[np.array(item["colbert"]) for item in items],
        colbert_scale=[np.array(item.get("colbert_scale")) for item in items],
        muvera=[item["muvera"] for item in items] if "muvera" in options else None,
    )


def cohere_answer(server: RunningServer) -> dict[str, SimpleNamespace]:
    """Cohere's API, for each of its types; the largest number of a vector is 127, so no scale."""
    body = {"texts": TEXTS, "input_type": "search_document"}
    body |= {"embedding_types": ["float", "int8", "uint8", "binary", "ubinary"]}
    answer = httpx2.post(f"{server.url}/v2/embed", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    made = answer.json()["embeddings"]
    made["float32"] = made.pop("float")
    scales = np.abs(made["float32"]).max(axis=1) / 127
    return {
        dtype: SimpleNamespace(
            dense=np.array(vectors), dense_scale=scales, colbert=None, muvera=None
        )
        for dtype, vectors in made.items()
    }


def assert_made_of(whole, answer, options: dict[str, Any], expected) -> None:
    """Whether `answer` is the float32 answer `whole` with `options`."""
    dtype = options.get("output_dtype", "float32")
    factor, side = options.get("colbert_pool_factor"), options.get("muvera")
    for i in range(len(TEXTS)):
        if answer.dense is not None:
            scale = None if answer.dense_scale is None else answer.dense_scale[i]
            assert_restored(answer.dense[i], scale, whole.dense[i], dtype)
        if answer.colbert is not None:
            vectors = whole.colbert[i]
            if factor is not None:
                vectors = in_order_of(answer.colbert[i], dtype, expected.pool(vectors, factor))
            scale = None if answer.colbert_scale is None else answer.colbert_scale[i]
            assert_restored(answer.colbert[i], scale, vectors, dtype)
        if side is not None:
            encoding = expected.muvera(whole.colbert[i], side)
            np.testing.assert_allclose(answer.muvera[i], encoding, rtol=0, atol=NOISE)
    assert (answer.muvera is None) == (side is None)


def in_order_of(values: np.ndarray, dtype: str, vectors: np.ndarray) -> np.ndarray:
    """The references' pooled vectors as they stand in `values`, however these are written."""
    if dtype in {"binary", "ubinary"}:
        values = bits_of(values, dtype) * 2.0 - 1
    nearest = (values @ vectors.T).argmax(axis=1)
    assert sorted(nearest) == list(range(len(vectors)))
    return vectors[nearest]


def assert_restored(values: np.ndarray, scale, vectors: np.ndarray, dtype: str) -> None:
    """Whether `values` are `vectors` in another number format."""
    assert values.shape[:-1] == vectors.shape[:-1]
    if dtype in {"binary", "ubinary"}:
        theirs = quantize_embeddings(np.atleast_2d(vectors), dtype).reshape(values.shape)
        different = bits_of(values, dtype) != bits_of(theirs, dtype)
        assert (np.abs(vectors)[different] < NOISE).all()
    elif dtype in {"int8", "uint8"}:
        shifted = np.int16(values) - (128 if dtype == "uint8" else 0)
        step = np.asarray(scale)[..., None]
        assert (np.abs(shifted * step - vectors) <= 0.5 * step + NOISE).all()
        assert (np.abs(shifted).max(axis=-1) == 127).all()
    else:
        np.testing.assert_allclose(values, vectors, rtol=STEPS[dtype], atol=NOISE)


def bits_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """Zeros and ones."""
    shift = 128 if dtype == "binary" else 0
    return np.unpackbits(np.uint8(np.int16(values) + shift), axis=-1)
