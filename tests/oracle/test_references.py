"""MUVERA, pooling and ColBERT models, compared with FastEmbed and PyLate."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import BertModel, MistralModel, Qwen3Model, XLMRobertaModel

from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import Outputs
from smart_embedder.vectors import MUVERA_WIDTH, muvera_of, pool
from tests.oracle.references import ENVIRONMENT, MISSING, References, run_references
from tests.support.wordpiece import ROBERTA, save_colbert

pytestmark = pytest.mark.timeout(600)  # The tests have hundreds of examples.

WIDE = settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
SIDES = st.sampled_from(["query", "document"])
# FastEmbed refuses vectors of less than 16 numbers, and does not project those of 16.
WIDTHS = st.sampled_from([16, 17, 48, 128])


@pytest.fixture(scope="module")
def references() -> Iterator[References]:
    """Run the packages."""
    if not ENVIRONMENT.is_dir():
        pytest.skip(MISSING)
    with run_references() as running:
        yield running


@st.composite
def unit_vectors(draw) -> np.ndarray:
    """Draw vectors around some directions, as close as the tokens of a text, or random."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    width, tokens = draw(WIDTHS), draw(st.integers(1, 90))
    centers = random.standard_normal((draw(st.integers(1, 12)), width))
    spread = draw(st.sampled_from([0.01, 0.1, 0.4, 1, 4]))
    vectors = centers[random.integers(len(centers), size=tokens)]
    vectors = vectors + spread * random.standard_normal((tokens, width))
    return np.float32(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


@WIDE
@given(vectors=unit_vectors(), side=SIDES)
def test_muvera_equals_fastembed(references, vectors, side) -> None:
    ours = muvera_of(vectors.shape[1]).encode(vectors, side)
    assert ours.shape == (MUVERA_WIDTH,)
    np.testing.assert_allclose(ours, references.muvera(vectors, side), rtol=0, atol=1e-5)


@WIDE
@given(vectors=unit_vectors(), factor=st.integers(2, 40), seed=st.integers(0, 2**32))
def test_colbert_pooling_equals_pylate(references, vectors, factor, seed) -> None:
    expected = references.pool(vectors, factor)
    noise = np.random.default_rng(seed).standard_normal(vectors.shape) * 1e-6
    with_noise = references.pool(np.float32(vectors + noise), factor)
    # Libraries may differ if the last digit decides which clusters are joined.
    assume(with_noise.shape == expected.shape and np.allclose(with_noise, expected, atol=1e-4))
    assert_same_vectors(pool(vectors, factor), expected)


def assert_same_vectors(ours: np.ndarray, expected: np.ndarray) -> None:
    """Compare vectors in any order, because PyLate's have the order of its labels."""
    assert ours.shape == expected.shape
    nearest = (ours @ expected.T).argmax(axis=1)
    assert sorted(nearest) == list(range(len(expected)))
    np.testing.assert_allclose(ours, expected[nearest], rtol=0, atol=2e-5)


CPU = torch.device("cpu")
TEXTS = [
    *["hybrid search", "memory, rank! (sea)", "rank " * 100, "!?", "unknown жизнь", ""],
    *["search sea " * length for length in (1, 5, 9, 30)],
]
GROUPED = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
BARE = {"query_prefix": "", "document_prefix": ""}
CASES = {
    "unattended": (BertModel, {}),
    "attended": (BertModel, {"attend_to_expansion_tokens": True}),
    "none": (BertModel, {"do_query_expansion": False}),
    "without markers": (BertModel, BARE),
    "a skipped word that is no token": (BertModel, {"skiplist_words": ["rank", "nonsense"]}),
    "xlm-roberta": (XLMRobertaModel, ROBERTA | BARE),
    "qwen3": (Qwen3Model, GROUPED),
    "mistral": (MistralModel, GROUPED | {"sliding_window": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_colbert_queries_and_documents_equal_pylate(
    references, tmp_path: Path, tiny_reranker: Path, case
) -> None:
    kind, changes = CASES[case]
    like = tiny_reranker if kind is XLMRobertaModel else None
    folder = save_colbert(tmp_path / "model", kind, tokenizer_of=like, **changes)
    target = Target(CPU, torch.float32, choose_backend(CPU, torch.float32))
    model, colbert = load_embedder("tiny-colbert", folder, 8192, target), Outputs(colbert=True)
    sides = ("query", "document")
    ids = [text.ids for side in sides for text in model.tokenize(TEXTS, input_type=side)]
    mixed = model.forward(ids, colbert)
    alone = [model.forward([sequence], colbert)[0] for sequence in ids]
    expected = [vectors for side in sides for vectors in references.embed(folder, TEXTS, side)]
    for result, vectors in zip([*mixed, *alone], expected * 2, strict=True):
        assert result.colbert.shape == vectors.shape
        np.testing.assert_allclose(result.colbert, vectors, rtol=0, atol=1e-5)
