"""ColBERT vectors converted where they were computed: the numbers that the host makes of them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.nn import functional

from smart_embedder.api.formats.vectors import TextVectors, vectors_of
from smart_embedder.engine.records import EmbedRequest, Outputs, TextEmbedding, in_own_memory
from smart_embedder.models.device.transfer import DeviceRows, start_copies
from smart_embedder.models.ops.proof import Target
from smart_embedder.models.tasks import conversion
from smart_embedder.models.tasks.conversion import Converter, prove_converter, try_converter
from smart_embedder.models.tasks.embedders import M3Embedder
from smart_embedder.vectors import MUVERA_WIDTH, OUTPUT_DTYPES, muvera_of, quantize
from tests.support.simulated_cuda import simulated_cuda
from tests.support.texts import varied_texts

CPU = torch.device("cpu")
WIDTHS = (5, 16, 96, 1024)


def unit_rows(count: int, width: int, dtype: torch.dtype = torch.float32) -> DeviceRows:
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(count * width))
    values = functional.normalize(drawn, dim=-1).to(dtype)
    return DeviceRows(values, torch.ones(count))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
@pytest.mark.parametrize("computed", [torch.float32, torch.float16])
def test_numbers_have_the_bits_that_the_host_gives_them(dtype, width, computed) -> None:
    rows = unit_rows(70, width, computed)
    rows.values[3] = 0
    (arrived,) = start_copies([Converter(CPU, width).quantize(rows, dtype)], len(rows.values))()
    expected = quantize(rows.values.float().numpy(), dtype)
    assert arrived.values.dtype == expected.values.dtype
    np.testing.assert_array_equal(arrived.values, expected.values)
    if expected.scales is not None:
        np.testing.assert_array_equal(arrived.check, expected.scales)
    assert arrived.finite.all()


@pytest.mark.parametrize("dtype", OUTPUT_DTYPES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_marked_in_every_format(dtype, value) -> None:
    rows = unit_rows(5, 16)
    rows.check[2] = value
    converter = Converter(CPU, 16)
    (arrived,) = start_copies([converter.quantize(rows, dtype)], len(rows.values))()
    assert arrived.finite.tolist() == [True, True, False, True, True]
    texts = [np.array([0, 1]), np.array([2, 3]), np.array([4])]
    (encoded,) = start_copies([converter.encode(rows, texts, "query")], len(rows.values))()
    assert encoded.finite.tolist() == [True, False, True]


@pytest.mark.parametrize("side", ["query", "document"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("at_once", [(256, 8192), (2, 90), (256, 1)])
def test_encodings_are_those_of_the_host(monkeypatch, side, width, at_once) -> None:
    """Of texts without vectors, with one, and with many, that do not lie side by side."""
    monkeypatch.setattr(conversion, "_TEXTS", at_once[0])
    monkeypatch.setattr(conversion, "_VECTORS", at_once[1])
    rows = unit_rows(200, width)
    # Equal vectors, and one of zeros.
    rows.values[7:9], rows.values[60] = rows.values[6], 0
    texts = [np.arange(*span) for span in ((1, 70), (71, 72), (90, 90), (199, 200), (100, 180, 3))]
    (encoded,) = start_copies([Converter(CPU, width).encode(rows, texts, side)], len(rows.values))()
    assert encoded.values.shape == (len(texts), MUVERA_WIDTH)
    for ours, text in zip(encoded.values, texts, strict=True):
        expected = muvera_of(width).encode(rows.values.numpy()[text], side)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


FORMS: list[dict[str, Any]] = [
    *({"output_dtype": dtype} for dtype in OUTPUT_DTYPES),
    {"output_dtype": "int8", "muvera": "query"},
    {"output_dtype": "int8", "colbert_pool_factor": 3, "muvera": "document"},
    {"outputs": Outputs(dense=True), "output_dtype": "int8", "muvera": "document"},
    {"outputs": Outputs(sparse=True)},
]


def asked(**fields: Any) -> EmbedRequest:
    outputs = fields.pop("outputs", Outputs(dense=True, sparse=True, colbert=True))
    return EmbedRequest([], outputs, **fields)


def assert_alike(ours: TextVectors, theirs: TextVectors) -> None:
    for name in ("dense", "colbert"):
        own, other = getattr(ours, name), getattr(theirs, name)
        assert (own is None) == (other is None)
        if own is not None:
            assert own.dtype == other.dtype
            np.testing.assert_array_equal(own.values, other.values)
            np.testing.assert_array_equal(own.scales, other.scales)
    assert (ours.muvera is None) == (theirs.muvera is None)
    if ours.muvera is not None:
        np.testing.assert_allclose(ours.muvera, theirs.muvera, rtol=0, atol=1e-6)


def test_texts_of_one_batch_that_want_different_things_each_get_theirs(embedder) -> None:
    converting = M3Embedder.__new__(M3Embedder)
    vars(converting).update(vars(embedder), _converter=Converter(CPU, embedder.colbert_width))
    requests = [asked(**form) for form in FORMS] * 2
    texts = embedder.tokenize(varied_texts(len(requests)))
    sequences, outputs = [each.ids for each in texts], [each.needed for each in requests]
    plain, converted = (each.launch(sequences, outputs)() for each in (embedder, converting))
    for request, ours, theirs in zip(requests, converted, plain, strict=True):
        assert isinstance(ours, TextEmbedding)
        assert theirs.quantized is theirs.muvera is None
        dtype = request.needed.form.dtype if request.outputs.colbert else None
        assert (ours.quantized is None) == (dtype in {None, "float32"})
        assert (ours.colbert is None) == (dtype != "float32")
        assert_alike(vectors_of(ours, request), vectors_of(theirs, request))
        # As for a job whose results must not hold those of another one.
        (own,) = in_own_memory([ours])
        assert_alike(vectors_of(own, request), vectors_of(theirs, request))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("wrong", ["", "values", "scales", "encodings"])
def test_the_proof_holds_where_the_numbers_are_the_hosts(monkeypatch, dtype, wrong: str) -> None:
    quantize, encode = Converter.quantize, Converter.encode

    def quantize_wrongly(*arguments: Any) -> DeviceRows:
        made = quantize(*arguments)
        if wrong == "values":
            return replace(made, values=made.values.roll(1, 0))
        return replace(made, check=made.check * 1.00001)

    def encode_wrongly(*arguments: Any) -> DeviceRows:
        made = encode(*arguments)
        return replace(made, values=made.values.roll(1, 0))

    if wrong == "encodings":
        monkeypatch.setattr(Converter, "encode", encode_wrongly)
    elif wrong:
        monkeypatch.setattr(Converter, "quantize", quantize_wrongly)
    converter, proof = try_converter(CPU, 64, dtype)
    assert converter is not None
    assert proof.holds == (not wrong)


def test_on_a_cpu_nothing_is_converted_before_it_is_rendered(embedder) -> None:
    assert embedder._converter is None
    assert conversion.CONVERSION not in embedder.info.paths


def test_a_gpu_that_cannot_convert_leaves_it_to_the_host_with_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(Converter, "encode", fail)
    with simulated_cuda():
        device = torch.device("cuda:0")
        target = Target(device, torch.float16, SimpleNamespace())
        backbone = SimpleNamespace(device=device, wire_dtype=torch.float16, target=target)
        with capture_logs() as logs:
            assert prove_converter(backbone, 64) is None
    (line,) = logs
    assert (line["event"], line["used_instead"]) == ("path_refused", "host")
    assert backbone.target.paths == {"convert_vectors": "host"}
    assert [each.reason for each in backbone.target.refused] == ["raises RuntimeError"]
