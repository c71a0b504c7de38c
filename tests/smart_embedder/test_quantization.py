"""Quantization: int8, binary and half precision, compared with sentence-transformers and torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sentence_transformers.util.quantization import quantize_embeddings

from smart_embedder.vectors import join_scales, quantize

NUMBERS = st.floats(-1e4, 1e4, width=32)
MATRICES = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=NUMBERS
)


@given(MATRICES)
def test_int8_and_uint8_are_restored_within_half_a_step(vectors) -> None:
    made = quantize(vectors, "int8")
    scales = made.scales[:, None]
    assert made.values.dtype == np.int8
    error = np.abs(np.float64(made.values) * scales - vectors)
    assert (error <= 0.5 * scales * (1 + 1e-4)).all()
    shifted = quantize(vectors, "uint8")
    assert shifted.values.dtype == np.uint8
    np.testing.assert_array_equal(np.int16(shifted.values) - 128, made.values)
    np.testing.assert_array_equal(shifted.scales, made.scales)


@given(MATRICES)
@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_binary_and_ubinary_equal_sentence_transformers(dtype, vectors) -> None:
    made = quantize(vectors, dtype)
    expected = quantize_embeddings(vectors, dtype)
    assert (made.values.dtype, made.scales) == (expected.dtype, None)
    np.testing.assert_array_equal(made.values, expected)


@given(MATRICES)
def test_float16_and_bfloat16_are_rounded_as_in_torch(vectors) -> None:
    bits = quantize(vectors, "bfloat16")
    expected = torch.from_numpy(vectors).to(torch.bfloat16)
    np.testing.assert_array_equal(bits.values.view(np.int16), expected.view(torch.int16).numpy())
    half = torch.from_numpy(vectors).to(torch.float16).numpy()
    np.testing.assert_array_equal(quantize(vectors, "float16").values, half)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(dtype, dtype) for dtype in ("float32", "float16", "bfloat16", "int8", "uint8")]
    + [("binary", "int8"), ("ubinary", "uint8")],
)
def test_a_vector_is_quantized_alone_as_in_a_batch(dtype, name) -> None:
    vectors = np.random.default_rng(0).standard_normal((4, 24)).astype(np.float32)
    together, alone = quantize(vectors, dtype), quantize(vectors[2], dtype)
    np.testing.assert_array_equal(together.values[2], alone.values)
    assert alone.type_name == name
    if alone.scales is not None:
        assert together.scales[2] == alone.scales
        assert join_scales([alone, together]).shape == (5,)
    else:
        assert join_scales([alone]) is None


def test_quantizing_zeros_and_no_vectors() -> None:
    assert not quantize(np.zeros((2, 8), np.float32), "int8").values.any()
    assert quantize(np.zeros((0, 8), np.float32), "int8").values.shape == (0, 8)
    assert quantize(np.zeros((0, 8), np.float32), "ubinary").values.shape == (0, 1)
