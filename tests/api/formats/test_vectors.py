"""What is made of a result's vectors: what it takes, what it leaves out, and what it refuses."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.api.formats.binary import pack
from smart_embedder.api.formats.vectors import EmbeddingAnswer, hold_rendering, vectors_of
from smart_embedder.api.handler import LARGE_ANSWER_BYTES
from smart_embedder.engine.records import (
    AnswerMemory,
    EmbeddingResult,
    EmbedRequest,
    Outputs,
    SparseVector,
    TextEmbedding,
    Timings,
    TokenStrings,
)
from smart_embedder.vectors import ColbertForm, quantize

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


def test_nothing_is_pooled_without_vectors_of_tokens() -> None:
    options = asked(ALL, colbert_pool_factor=2)
    dense, whole = TextEmbedding(np.ones(4, np.float32)), embedding_of(10)
    for each, text, size in ((options, dense, 0), (options, whole, 400), (asked(ALL), whole, 0)):
        memory = AnswerMemory()
        hold_rendering([text], each, memory)
        assert memory.held == size


@pytest.mark.parametrize(
    ("options", "vectors", "long"),
    [
        (asked(ALL, output_dtype="int8"), 100, False),
        (asked(ALL, colbert_pool_factor=2), 100, True),
        (asked(ALL, muvera="query"), 1, True),
    ],
)
def test_what_takes_long_holds_so_much_that_it_leaves_the_event_loop(
    options, vectors, long
) -> None:
    memory = AnswerMemory()
    hold_rendering([embedding_of(vectors)], options, memory)
    assert (memory.held >= LARGE_ANSWER_BYTES) is long


def test_muvera_needs_vectors_that_the_answer_may_leave_out() -> None:
    dense = Outputs(dense=True)
    assert asked(dense).needed == dense
    alone = ColbertForm(None, "query")
    assert asked(dense, muvera="query").needed == Outputs(dense=True, colbert=True, form=alone)
    made = vectors_of(embedding_of(5), asked(dense, muvera="query"))
    assert made.colbert is None
    assert made.muvera.shape == (10_240,)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, ColbertForm("float32")),
        ({"output_dtype": "int8"}, ColbertForm("int8")),
        ({"output_dtype": "int8", "muvera": "document"}, ColbertForm("int8", "document")),
        # Only the host makes fewer vectors, of numbers that are not rounded yet.
        ({"output_dtype": "int8", "colbert_pool_factor": 2}, ColbertForm("float32")),
    ],
)
def test_a_device_is_told_what_an_answer_has_of_colbert_vectors(fields, form) -> None:
    assert asked(ALL, **fields).needed.form == form


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


def test_a_kind_that_the_result_does_not_have_is_none() -> None:
    request = asked(ALL, output_dtype="int8", colbert_pool_factor=2, muvera="document")
    made = vectors_of(TextEmbedding(), request)
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


@pytest.mark.parametrize("size", [0, 1, 127, 128, 255, 256, 65_535, 65_536])
def test_an_array_in_msgpack_is_what_a_packer_writes_of_its_bytes(size: int) -> None:
    values = np.arange(size).astype(np.uint8)
    about = {b"nd": True, b"type": "|u1", b"kind": b"", b"shape": [size]}
    packed = b"".join(pack(msgpack.Packer(), {"it": [1], "array": values}))
    assert packed == msgpack.packb({"it": [1], "array": about | {b"data": values.tobytes()}})
