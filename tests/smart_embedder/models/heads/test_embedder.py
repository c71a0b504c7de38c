"""The vectors of bge-m3, compared with FlagEmbedding on the same files, and its heads."""

import random
import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from FlagEmbedding import BGEM3FlagModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.kernels.target import choose_backend
from smart_embedder.models.heads.embedder import collect_sparse_vectors, compute_dense_vectors
from smart_embedder.models.heads.m3 import M3Embedder
from smart_embedder.models.loader import load_embedder
from smart_embedder.requests import Outputs
from smart_embedder.results import TextEmbedding
from tests.support.encoders import float32
from tests.support.packed_attention import pack_lengths
from tests.support.texts import varied_texts

ALL = Outputs(dense=True, sparse=True, colbert=True)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reference(tiny_m3: Path) -> BGEM3FlagModel:
    return BGEM3FlagModel(str(tiny_m3), use_fp16=False, devices="cpu")


def embed(model: M3Embedder, texts: list[str], outputs: Outputs = ALL) -> list[TextEmbedding]:
    return model.forward([text.ids for text in model.tokenize(texts)], outputs)


def assert_equals_reference(model: M3Embedder, reference: BGEM3FlagModel, texts: list[str]) -> None:
    kinds = {f"return_{kind}": True for kind in ("dense", "sparse", "colbert_vecs")}
    theirs = reference.encode(texts, batch_size=2, max_length=8192, **kinds)
    for index, ours in enumerate(embed(model, texts)):
        for name, vectors in (("dense_vecs", ours.dense), ("colbert_vecs", ours.colbert)):
            assert vectors.shape == theirs[name][index].shape
            np.testing.assert_allclose(vectors, theirs[name][index], rtol=0, atol=TOLERANCE)
        expected = {int(k): float(v) for k, v in theirs["lexical_weights"][index].items()}
        actual = zip(ours.sparse.indices.tolist(), ours.sparse.values.tolist(), strict=True)
        assert dict(actual) == pytest.approx(expected, rel=0, abs=TOLERANCE)


def test_bge_m3_vectors_equal_flagembedding(
    embedder: M3Embedder, reference: BGEM3FlagModel
) -> None:
    assert embedder.normalizes
    assert_equals_reference(embedder, reference, varied_texts(50))


def test_each_text_has_exactly_the_requested_kinds(embedder: M3Embedder) -> None:
    texts = [text.ids for text in embedder.tokenize(varied_texts(16))]
    chosen = [Outputs(*flags) for flags in product((True, False), repeat=3)] * 2
    order = random.Random(1).sample(range(16), 16)
    results = embedder.launch([texts[index] for index in order], [chosen[index] for index in order])
    for index, result in zip(order, results(), strict=True):
        (alone,) = embedder.forward([texts[index]], ALL)
        for kind in ("dense", "sparse", "colbert"):
            found, expected = getattr(result, kind), getattr(alone, kind)
            if not getattr(chosen[index], kind):
                assert found is None
            elif kind == "sparse":
                np.testing.assert_array_equal(found.indices, expected.indices)
                np.testing.assert_allclose(found.values, expected.values, rtol=0, atol=TOLERANCE)
            else:
                np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("head", ["sparse_linear.pt", "colbert_linear.pt"])
def test_bge_m3_without_one_of_its_heads_is_refused(
    head: str, tiny_m3: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "m3")
    (folder / head).unlink()
    with pytest.raises(StartupError, match=f"{head} cannot be loaded: .*No such file"):
        load_embedder("m3", folder, 8192, float32())


CPU = torch.device("cpu")

IGNORED = np.array([0, 1, 2, 3])
PAIR = st.tuples(st.integers(0, 250_001), st.floats(0, 4, width=32))
CASE = st.lists(st.lists(PAIR, min_size=1, max_size=12), min_size=1, max_size=8)


def largest_weights(pairs: list[tuple[int, float]]) -> dict[int, float]:
    weights: dict[int, float] = {}
    for token, weight in pairs:
        if token not in IGNORED and weight > weights.get(token, 0):
            weights[token] = weight
    return weights


@given(CASE)
@settings(max_examples=30)
def test_sparse_vectors_keep_the_largest_weight_of_each_token(case) -> None:
    ids = [np.array([token for token, _ in pairs], np.int64) for pairs in case]
    weights = [np.array([weight for _, weight in pairs], np.float32) for pairs in case]
    vectors = collect_sparse_vectors(ids, weights, IGNORED)
    assert len(vectors) == len(case)
    for pairs, vector in zip(case, vectors, strict=True):
        found = dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
        assert found == largest_weights(pairs)
        assert vector.indices.tolist() == sorted(found)
        assert vector.values.dtype == np.float32


@pytest.mark.parametrize(
    ("pooling", "dtype"),
    [("cls", torch.bfloat16), ("mean", torch.float32), ("mean", torch.bfloat16)],
)
def test_dense_vectors_are_cls_or_mean_of_unit_length(pooling: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = pack_lengths([3, 1, 5, 2])
    hidden = torch.randn(packed.tokens, 16).to(dtype)
    hidden[packed.offsets[1]] = torch.nan
    chosen = np.array([2, 1, 0])
    vectors = compute_dense_vectors(choose_backend(CPU, dtype), pooling, hidden, packed, chosen)
    assert (vectors.values.dtype, vectors.values.shape) == (torch.float32, (3, 16))
    for row, sequence in enumerate(chosen):
        states = hidden[packed.offsets[sequence] : packed.offsets[sequence + 1]].float()
        exact = states[0] if pooling == "cls" else states.mean(0)
        expected = functional.normalize(exact, dim=0)
        torch.testing.assert_close(vectors.values[row], expected, equal_nan=True)
    assert vectors.check.isfinite().tolist() == [True, False, True]
