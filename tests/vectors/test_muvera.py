"""Encodings of ColBERT vectors against FastEmbed's, recorded by `record_references`."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.vectors import MUVERA_WIDTH, Muvera, muvera_of
from tests.vectors.conftest import REFERENCES
from tests.vectors.record_references import SHAPES, STEP, vectors_of


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_encodings_equal_fastembeds(tokens, width, side) -> None:
    encoding = muvera_of(width).encode(vectors_of(tokens, width), side)
    assert (encoding.shape, encoding.dtype) == ((MUVERA_WIDTH,), np.float32)
    expected = REFERENCES["muvera"][f"{tokens}x{width}"][side]
    np.testing.assert_allclose(encoding[::STEP], expected, rtol=0, atol=1e-5)


def test_no_vectors_are_all_zeros() -> None:
    assert not muvera_of(16).encode(np.zeros((0, 16), np.float32), "document").any()


@pytest.mark.parametrize("width", [1, 8, 15])
def test_vectors_that_are_narrow_are_not_projected(width) -> None:
    """Every repetition's sums are those of the vectors themselves, with zeros beside them."""
    vectors = vectors_of(30, width)
    cells = Muvera(width).encode(vectors, "query").reshape(-1, 32, 16)
    np.testing.assert_allclose(
        cells.sum(axis=1)[:, :width], np.tile(vectors.sum(axis=0), (20, 1)), atol=1e-4
    )
    assert not cells[..., width:].any()


@given(st.integers(1, 40), st.sampled_from(["query", "document"]))
def test_an_encoder_made_anew_is_the_same(tokens, side) -> None:
    vectors = vectors_of(tokens, 16)
    ours, again = muvera_of(16).encode(vectors, side), Muvera(16).encode(vectors, side)
    np.testing.assert_array_equal(ours, again)


def test_products_of_encodings_rank_as_maxsim_does() -> None:
    query = vectors_of(6, 48)
    documents = [vectors_of(tokens, 48) for tokens in range(20, 40)]
    encoder = muvera_of(48)
    encoded = encoder.encode(query, "query")
    products = [encoded @ encoder.encode(each, "document") for each in documents]
    maxsims = [(query @ each.T).max(axis=1).sum() for each in documents]
    assert np.corrcoef(products, maxsims)[0, 1] > 0.5


def test_a_vector_of_zeros_is_on_no_side_and_falls_into_the_first_cell() -> None:
    (vector,) = vectors_of(1, 16)
    encoder = Muvera(16)
    alone = encoder.encode(vector[None], "query").reshape(20, 32, 16)
    cell = alone.any(axis=2).argmax(axis=1)
    both = encoder.encode(np.stack([np.zeros_like(vector), vector]), "document")
    first = both.reshape(20, 32, 16)[:, 0]
    np.testing.assert_allclose(first, np.where(cell[:, None] == 0, vector / 2, 0), atol=1e-7)
    assert len(set(cell.tolist())) > 5
