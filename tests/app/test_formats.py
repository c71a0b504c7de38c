"""All formats of a response hold the same numbers, as the libraries of the formats read them."""

import base64
import gc
from dataclasses import replace

import numpy as np
import pytest

from app import formats as binary
from app.answers import EmbeddingAnswer, render_embeddings
from smart_embedder.requests import EmbedRequest, Outputs
from smart_embedder.results import (
    EmbeddingResult,
    SparseVector,
    TextEmbedding,
    Timings,
    TokenStrings,
)
from tests.support.formats import (
    JSON,
    SAFETENSORS,
    Item,
    arrays_of,
    assert_arrays,
    decode,
)


def answer_to(
    tokens: list[int], request: EmbedRequest, *, strings: bool = False
) -> EmbeddingAnswer:
    """A response to texts with these numbers of tokens."""
    random, kinds = np.random.default_rng(len(tokens)), request.needed
    embeddings, names = list[TextEmbedding](), list[TokenStrings]()
    for count in tokens:
        weights = SparseVector(np.arange(3, 3 + count), random.random(count, np.float32))
        rows = random.normal(size=(count + 1, 64)).astype(np.float32)
        dense, colbert = rows[-1] if kinds.dense else None, rows[:-1] if kinds.colbert else None
        embeddings.append(TextEmbedding(dense, weights if kinds.sparse else None, colbert))
        named = (["é"] if kinds.sparse else None, ["b"] if kinds.colbert else None)
        names.append(TokenStrings(*(strings and strings * count for strings in named)))
    timings = Timings(0, 0, 0, 0)
    result = EmbeddingResult(embeddings, [], sum(tokens), timings, names if strings else None)
    texts = [f'"{count}"' for count in tokens]
    return EmbeddingAnswer(replace(request, texts=texts), result, {"model_name": "d"})


def of_base64(item: Item) -> Item:
    """Decode the arrays of a JSON response."""
    if "data" not in item:
        return {
            name: of_base64(value) if isinstance(value, dict) else value
            for name, value in item.items()
        }
    kind = item["dtype"].replace("bfloat16", "uint16")
    return np.frombuffer(base64.b64decode(item["data"]), kind).reshape(item["shape"])


RENDERERS = {
    SAFETENSORS: binary.render_safetensors,
    JSON: lambda answer: render_embeddings(answer, sparse_as_indices=True, as_base64=False),
    "base64": lambda answer: render_embeddings(answer, sparse_as_indices=False, as_base64=True),
}


@pytest.mark.parametrize(
    ("kinds", "muvera", "tokens", "strings"),
    [
        (("dense", "sparse", "colbert"), "document", [1, 2, 4], False),
        (("sparse", "colbert"), None, [4100, 7], False),
        (("sparse", "colbert"), None, [3, 1], True),
        (("sparse",), None, [0], True),
        ((), "query", [5], False),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("accept", RENDERERS)
def test_json_base64_and_safetensors_hold_the_whole_response(
    accept, dtype, kinds, muvera, tokens, strings
) -> None:
    if accept == JSON and dtype.endswith("float16"):
        return
    outputs = Outputs(**dict.fromkeys(kinds, True))
    request = EmbedRequest([], outputs, output_dtype=dtype, muvera=muvera)
    answer = answer_to(tokens, request, strings=strings)
    content = b"".join(RENDERERS[accept](answer))
    items, report = decode(JSON if accept == "base64" else accept, content)
    untyped = {"output_dtype"} if (accept, dtype) == (JSON, "float32") else set()
    assert report == {name: value for name, value in answer.report().items() if name not in untyped}
    if accept == "base64":
        items = [of_base64(item) for item in items]
    for item, text, row in zip(items, answer.request.texts, answer.vectors(), strict=True):
        assert item.pop("text", text) == text
        item.pop("id", None)
        assert_arrays(item, arrays_of(row))


def test_the_response_has_the_preferred_format_and_errors_are_json(client) -> None:
    """test_context.py covers the preferences."""
    for sentences, status, expected in ((["a"], 200, SAFETENSORS), ([], 400, JSON)):
        headers = {"Accept": f"application/json;q=0.5, {SAFETENSORS};q=0.9, */*;q=0.1"}
        answer = client.post("/embeddings/", json={"sentences": sentences}, headers=headers)
        assert (answer.status_code, answer.headers["content-type"]) == (status, expected)


def test_rendered_chunks_outlive_the_result() -> None:
    request = EmbedRequest([], Outputs(dense=True, colbert=True), output_dtype="float16")
    answer = answer_to([127] * 4, request)
    expected = b"".join(binary.render_safetensors(answer))
    pieces = list(binary.render_safetensors(answer))
    del answer
    gc.collect()
    junk = [np.full((127, 64), place, np.float16) for place in range(16)]
    assert b"".join(pieces) == expected
    del junk
