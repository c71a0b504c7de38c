"""Each head, and the sparse one's bookkeeping, against the plainest way to write it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from smart_embedder.models.batch.packing import pack
from smart_embedder.models.device.transfer import DeviceRows
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.tasks.base import sparse_vectors, token_states, token_vectors
from smart_embedder.models.tasks.dense import dense_vectors, token_weights

CPU = torch.device("cpu")

IGNORED = np.array([0, 1, 2, 3])
PAIR = st.tuples(st.integers(0, 250_001), st.floats(0, 4, width=32))
CASE = st.lists(st.lists(PAIR, min_size=1, max_size=12), min_size=1, max_size=8)


def one_by_one(pairs: list[tuple[int, float]]) -> dict[int, float]:
    weights: dict[int, float] = {}
    for token, weight in pairs:
        if token not in IGNORED and weight > weights.get(token, 0):
            weights[token] = weight
    return weights


@given(CASE)
def test_each_text_keeps_its_largest_weight_for_each_token(case) -> None:
    ids = [np.array([token for token, _ in pairs], np.int64) for pairs in case]
    weights = [np.array([weight for _, weight in pairs], np.float32) for pairs in case]
    vectors = sparse_vectors(ids, weights, IGNORED)
    assert len(vectors) == len(case)
    for pairs, vector in zip(case, vectors, strict=True):
        found = dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
        assert found == one_by_one(pairs)
        assert vector.indices.tolist() == sorted(found)
        assert vector.values.dtype == np.float32


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_vector_is_the_first_state_or_the_mean_of_all_of_unit_length(
    pooling: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    packed = pack([np.zeros(length, np.int64) for length in (3, 1, 5, 2)], device=CPU)
    hidden = torch.randn(packed.tokens, 16).to(dtype)
    hidden[packed.offsets[1]] = torch.nan
    chosen = np.array([2, 1, 0])
    made = dense_vectors(choose_backend(CPU, dtype), pooling, hidden, packed, chosen)
    assert (made.values.dtype, made.values.shape) == (torch.float32, (3, 16))
    for row, sequence in enumerate(chosen):
        own = hidden[packed.offsets[sequence] : packed.offsets[sequence + 1]].float()
        exact = own[0] if pooling == "cls" else own.mean(0)
        expected = functional.normalize(exact, dim=0)
        torch.testing.assert_close(made.values[row], expected, equal_nan=True)
    assert made.check.isfinite().tolist() == [True, False, True]


def test_every_token_has_a_weight_a_vector_of_unit_length_and_its_state() -> None:
    torch.manual_seed(0)
    states = torch.randn(7, 16)
    states[4, 3] = torch.inf
    weigh, project = nn.Linear(16, 1), nn.Linear(16, 6)
    backend = choose_backend(CPU, torch.float32)
    backbone = SimpleNamespace(backend=backend, wire_dtype=torch.float16)
    with torch.inference_mode():
        weights = token_weights(weigh, states)
        vectors = token_vectors(project, backbone, states)
        own = token_states(states.bfloat16())
        torch.testing.assert_close(weights.values, weigh(states)[:, 0])
        expected = functional.normalize(project(states), dim=1)
    kept = [0, 1, 2, 3, 5, 6]
    assert vectors.values.dtype == torch.float16
    torch.testing.assert_close(vectors.values[kept].float(), expected[kept], rtol=0, atol=1e-3)
    assert own.values.dtype == torch.float32
    torch.testing.assert_close(own.values, states.bfloat16().float())
    for rows in (weights, vectors, own):
        assert isinstance(rows, DeviceRows)
        assert rows.check.isfinite().nonzero().flatten().tolist() == kept
