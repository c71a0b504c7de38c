"""What is made of a result's vectors: what it takes, what it leaves out, and what it refuses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.answers import EmbeddingAnswer, hold_rendering, vectors_of
from app.handler import LARGE_ANSWER_BYTES
from smart_embedder.requests import AnswerMemory, EmbedRequest, Outputs
from smart_embedder.results import (
    EmbeddingResult,
    SparseVector,
    TextEmbedding,
    Timings,
    TokenStrings,
)
from smart_embedder.vectors import quantize

ALL = Outputs(dense=True, sparse=True, colbert=True)
DTYPES = ["float32", "float16", "bfloat16", "int8", "uint8", "binary", "ubinary"]


def asked(outputs: Outputs, **fields: Any) -> EmbedRequest:
    return EmbedRequest([], outputs, **fields)


def embedding_of(tokens: int, width: int = 16) -> TextEmbedding:
    random = np.random.default_rng(tokens)
    colbert = random.normal(size=(tokens, width)).astype(np.float32)
    weights = SparseVector(np.arange(tokens), np.ones(tokens, np.float32))
    return TextEmbedding(np.ones(width, np.float32), weights, colbert)


class Held(AnswerMemory):
    """Notes all that is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def need(self, size: int, what: str, advice: str) -> None:
        super().need(size, what, advice)
        self.asked.append(size)


@given(
    st.lists(st.integers(1, 30), max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([None, 2, 5]),
    st.sampled_from([None, "document"]),
    st.booleans(),
)
def test_what_is_made_is_held_before_it_is_made(texts, dtype, factor, muvera, at_once) -> None:
    options = asked(ALL, output_dtype=dtype, colbert_pool_factor=factor, muvera=muvera)
    embeddings = [embedding_of(tokens) for tokens in texts]
    memory = Held()
    hold_rendering(embeddings, options, memory, at_once=at_once)
    pooling = max((4 * tokens**2 for tokens in texts), default=0) if factor else 0
    (held,) = memory.asked
    made = 0
    for embedding in embeddings:
        vectors = vectors_of(embedding, options)
        new = vectors.nbytes - 8 * embedding.sparse.indices.size
        made += new if dtype != "float32" else (0 if vectors.muvera is None else 40_960)
    assert held - pooling >= (made if at_once else 0)
    # Half of float32 at most, and what MUVERA adds.
    most = [
        (e.nbytes // 2 if dtype != "float32" else 0) + 40_960 * bool(muvera) for e in embeddings
    ]
    assert held - pooling == (sum(most) if at_once else max(most, default=0))


@pytest.mark.parametrize(
    ("options", "embedding", "held"),
    [
        (asked(ALL), embedding_of(10), 0),
        (asked(ALL, colbert_pool_factor=2), embedding_of(10), 400),
        (asked(ALL, colbert_pool_factor=2), TextEmbedding(np.ones(4, np.float32)), 0),
        # What takes long holds so much that it leaves the event loop.
        (asked(ALL, output_dtype="int8"), embedding_of(100), range(LARGE_ANSWER_BYTES)),
        (asked(ALL, colbert_pool_factor=2), embedding_of(100), range(LARGE_ANSWER_BYTES, 1 << 20)),
        (asked(ALL, muvera="query"), embedding_of(1), range(LARGE_ANSWER_BYTES, 1 << 20)),
    ],
)
def test_only_what_is_made_is_held(options, embedding, held) -> None:
    memory = AnswerMemory()
    hold_rendering([embedding], options, memory)
    assert memory.held in (held if isinstance(held, range) else {held})


DENSE = Outputs(dense=True)


def test_muvera_needs_colbert_vectors_that_the_answer_may_leave_out() -> None:
    request = asked(DENSE, muvera="query")
    assert request.needed == replace(DENSE, colbert=True)
    assert (asked(DENSE).needed, asked(ALL).needed) == (DENSE, ALL)
    made = vectors_of(embedding_of(5), request)
    assert made.colbert is None
    assert made.muvera is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_and_colbert_vectors_are_quantized_and_others_are_not(dtype) -> None:
    embedding = embedding_of(6)
    request = asked(ALL, output_dtype=dtype, colbert_pool_factor=3)
    made = vectors_of(embedding, request, TokenStrings(["a"], None))
    np.testing.assert_array_equal(made.dense.values, quantize(embedding.dense, dtype).values)
    assert (made.colbert.dtype, len(made.colbert.values)) == (dtype, 2)
    assert made.sparse is embedding.sparse
    assert made.tokens == TokenStrings(["a"], None)
    values = made.dense.values.nbytes + made.colbert.values.nbytes
    assert made.nbytes == values + 6 * 8
    made = vectors_of(TextEmbedding(), replace(request, muvera="document"))
    assert (made.dense, made.sparse, made.colbert, made.muvera, made.nbytes) == (None,) * 4 + (0,)


def test_an_answer_has_its_texts_in_order_and_tells_who_made_it() -> None:
    timings = Timings(tokenize=0, queue=0, inference=0, total=0)
    strings = [TokenStrings(["a"], None), TokenStrings(["b"], None)]
    result = EmbeddingResult([embedding_of(1), embedding_of(2)], [], 3, timings, strings)
    request = EmbedRequest(["x", "y"], ALL, output_dtype="int8")
    answer = EmbeddingAnswer(request, result, {"model_name": "d"})
    assert [len(row.colbert.values) for row in answer.vectors()] == [1, 2]
    assert [row.tokens for row in answer.vectors()] == strings
    assert {"model_name": "d", "output_dtype": "int8"}.items() <= answer.report().items()
