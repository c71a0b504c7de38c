"""Kinds of vectors that the models make, or not, and what a request gets of them."""

from dataclasses import replace

import numpy as np
import pytest

from smart_embedder.engine import Engine, RerankRequest
from smart_embedder.engine.records import EmbedRequest, Outputs, TextEmbedding
from smart_embedder.errors import InvalidRequestError, KindNotMadeError
from smart_embedder.settings import Settings
from tests.engine.fakes import ALL, FakeModel, FakeReranker, loaded


class FakeDense(FakeModel):
    """Makes dense vectors alone, of any length."""

    name = "fake-dense"
    kinds = Outputs(dense=True, states=True)
    normalizes = False

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        return [TextEmbedding(dense=np.float32([3, 4, 0, 0])) for _ in sequences]


class FakeSparse(FakeModel):
    name = "fake-sparse"
    kinds = Outputs(sparse=True)


def engine_with(embedder: FakeModel, **parts) -> Engine:
    models = replace(loaded(embedder), **parts)
    return Engine(Settings(), lambda _: models)


async def test_a_kind_that_is_not_made_is_refused_and_the_models_are_named() -> None:
    async with engine_with(FakeSparse(), dense=FakeDense()) as engine:
        with pytest.raises(KindNotMadeError) as caught:
            await engine.embed(EmbedRequest(["ab"], ALL))
        with pytest.raises(KindNotMadeError, match="dense vectors are not made here"):
            await engine.embed(EmbedRequest(["ab"], model="BAAI/bge-m3"))
        with pytest.raises(InvalidRequestError, match="nothing is asked for"):
            await engine.embed(EmbedRequest(["ab"], Outputs()))
    assert str(caught.value) == (
        "ColBERT vectors are not made here: fake-dense and fake-sparse make dense vectors, sparse "
        "vectors, vectors of tokens"
    )


async def test_each_kind_comes_from_the_model_that_makes_it() -> None:
    sparse, dense = FakeSparse(), FakeDense()
    async with engine_with(sparse, dense=dense, reranker=FakeReranker()) as engine:
        await engine.embed(EmbedRequest(["ab"], Outputs(dense=True, sparse=True)))
        await engine.rerank(RerankRequest("a", ["b"]))
    assert dense.outputs == [[Outputs(dense=True)]]
    assert sparse.outputs == [[Outputs(sparse=True)]]


@pytest.mark.parametrize("normalize", [False, True])
async def test_unit_length_is_given_where_it_is_asked_for(normalize) -> None:
    async with engine_with(FakeDense()) as engine:
        (made,) = (await engine.embed(EmbedRequest(["ab"], normalize_dense=normalize))).embeddings
    assert made.dense.tolist() == pytest.approx([0.6, 0.8, 0, 0] if normalize else [3, 4, 0, 0])
