"""ColBERT vectors as an answer has them, made on the device, before they are copied.

A text of 256 tokens has half a megabyte of them in float16, a sixteenth of that in bits, and 40 KB
as MUVERA encodes them. `smart_embedder.vectors` does the same on the host, and is the reference.
Pooling is left to it: of Ward's clusters each step depends on the one before.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from smart_embedder.models.batch import Indices, to_device
from smart_embedder.models.device.transfer import DeviceRows
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.ops.proof import Proof, try_path
from smart_embedder.vectors import (
    CELLS,
    HYPERPLANES,
    LEAST,
    MAX_INT8,
    OUTPUT_DTYPES,
    PROJECTED,
    REPETITIONS,
    SCALED,
    MuveraSide,
    OutputDtype,
    muvera_of,
    quantize,
)

# The name of the operation where /health tells by what it is computed.
CONVERSION, ON_DEVICE, ON_HOST = "convert_vectors", "device", "host"
_SIDES: tuple[MuveraSide, ...] = ("query", "document")
_HIGHEST_BIT = 128
# Texts, and their vectors, that are encoded at a time, in float64.
_TEXTS, _VECTORS = 256, 8192
# Not as near as any cell: above five bits, times the number of cells.
_FAR = 255
# Of the proof: vectors of each text. Rounding is the same everywhere.
_LENGTHS = (1, 8, 66)
_TOLERANCE = 1e-6


class Converter:
    """Converts vectors of `width` numbers on a device."""

    def __init__(self, device: torch.device, width: int) -> None:
        muvera, cells = muvera_of(width), np.arange(CELLS)
        constants = (
            muvera.planes,
            muvera.projections,
            1 << np.arange(HYPERPLANES),
            # Ordered by distance, and of equal ones by the number of the cell.
            (muvera.distances * CELLS + cells).astype(np.uint8),
            _HIGHEST_BIT >> np.arange(8, dtype=np.uint8),
        )
        self._device = device
        self._planes, self._projections, self._powers, self._nearness, self._bits = (
            to_device(device, each) for each in constants
        )

    def quantize(self, rows: DeviceRows, dtype: OutputDtype) -> DeviceRows:
        """`[R, width]` as `smart_embedder.vectors.quantize`; the check of int8 is its scale."""
        values, check = rows.values, rows.check
        match dtype:
            case "float32":
                return rows
            case "float16" | "bfloat16":
                values = values.to(getattr(torch, dtype))
            case "int8" | "uint8":
                numbers = values.float()
                largest = numbers.abs().amax(-1, keepdim=True).clamp_min(LEAST)
                # By a number from the host PyTorch would multiply with its reciprocal.
                most = torch.full_like(largest, MAX_INT8)
                values = (numbers * (most / largest)).round().to(torch.int8)
                # What is not finite stays so.
                check = (largest / most).squeeze(-1) + 0 * check
                if dtype == "uint8":
                    values = values.view(torch.uint8).bitwise_xor(_HIGHEST_BIT)
            case "binary" | "ubinary":
                above = functional.pad(values > 0, (0, -values.shape[-1] % 8))
                bytes_of_bits = above.view(len(values), -1, 8) * self._bits
                values = bytes_of_bits.sum(-1, dtype=torch.uint8)
                if dtype == "binary":
                    values = values.bitwise_xor(_HIGHEST_BIT).view(torch.int8)
        return DeviceRows(values, check, as_they_are=True)

    def encode(self, rows: DeviceRows, texts: Sequence[Indices], side: MuveraSide) -> DeviceRows:
        """`[S, 10240]` float32: of each text by MUVERA, where `texts` are the rows of each."""
        encoded = [self._encode(rows, some, side) for some in _few_at_once(texts)]
        values, check = map(torch.cat, zip(*encoded, strict=True))
        return DeviceRows(values, check)

    def _encode(
        self, rows: DeviceRows, texts: Sequence[Indices], side: MuveraSide
    ) -> tuple[Tensor, Tensor]:
        """The encodings, and for each a number that is finite where its vectors are."""
        chosen = to_device(self._device, np.concatenate(texts).astype(np.int64))
        owners = to_device(self._device, np.repeat(np.arange(len(texts)), [*map(len, texts)]))
        check = rows.check.index_select(0, chosen)
        check = check.new_zeros(len(texts)).index_add_(0, owners, check)
        vectors = rows.values.index_select(0, chosen).double()
        above = (vectors @ self._planes > 0).view(-1, REPETITIONS, HYPERPLANES)
        projected = (vectors @ self._projections).view(-1, PROJECTED)
        # One of all texts' cells for each vector and repetition, `[vectors x repetitions]`.
        repetitions = torch.arange(REPETITIONS, device=self._device)
        fields = owners[:, None] * REPETITIONS + repetitions
        cells = (fields * CELLS + (above * self._powers).sum(-1)).flatten()
        count = len(texts) * REPETITIONS * CELLS
        sums = projected.new_zeros(count, PROJECTED).index_add_(0, cells, projected)
        if side == "document":
            ones = torch.ones_like(projected[:, 0])
            sizes = projected.new_zeros(count).index_add_(0, cells, ones)
            # The first vector in each cell; beyond the last one there is a zero.
            places = torch.arange(len(cells), device=self._device)
            first = torch.full_like(sizes, len(cells), dtype=torch.int64)
            first.scatter_reduce_(0, cells, places, "amin")
            occupied = (sizes > 0).view(-1, 1, CELLS)
            nearest = torch.where(occupied, self._nearness, _FAR).amin(-1) % CELLS
            taken = first.view(-1, CELLS).gather(1, nearest.long()).flatten()
            filling = functional.pad(projected, (0, 0, 0, 1)).index_select(0, taken)
            means = sums / sizes.clamp_min(1)[:, None]
            sums = torch.where(occupied.view(-1, 1), means, filling)
        return sums.view(len(texts), -1).float(), check


def _few_at_once(texts: Sequence[Indices]) -> Iterator[list[Indices]]:
    some: list[Indices] = []
    for text in texts:
        if some and (len(some) == _TEXTS or sum(map(len, some)) + len(text) > _VECTORS):
            yield some
            some = []
        some.append(text)
    if some:
        yield some


def prove_converter(backbone: Backbone, width: int) -> Converter | None:
    """What converts a model's vectors on an NVIDIA GPU, if it makes the numbers of the host there.

    None leaves them to the host. The backbone's target tells which it is.
    """
    if backbone.device.type != "cuda":
        return None
    converter, proof = try_converter(backbone.device, width, backbone.wire_dtype)
    path, refused = (ON_DEVICE, []) if proof.holds else (ON_HOST, [proof])
    backbone.target = backbone.target.taking(CONVERSION, path, refused)
    return converter if proof.holds else None


@torch.inference_mode()
def try_converter(
    device: torch.device, width: int, dtype: torch.dtype
) -> tuple[Converter | None, Proof]:
    """A converter, None if it cannot be made, and the proof of it for vectors in `dtype`."""
    count, made = sum(_LENGTHS), list[Converter]()
    texts = np.split(np.arange(count), np.cumsum(_LENGTHS)[:-1])
    drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(0))
    drawn = functional.normalize(drawn, dim=-1).to(dtype)
    vectors, expected = drawn.float().numpy(), list[Tensor]()
    for other in OUTPUT_DTYPES[1:]:
        on_host = quantize(vectors, other)
        values = torch.from_numpy(on_host.values)
        expected.append(values.view(torch.bfloat16) if other == "bfloat16" else values)
        if on_host.scales is not None:
            expected.append(torch.from_numpy(on_host.scales))
    for side in _SIDES:
        encoded = [muvera_of(width).encode(vectors[rows], side) for rows in texts]
        expected.append(torch.from_numpy(np.stack(encoded)))

    def convert() -> list[Tensor]:
        converter = Converter(device, width)
        made.append(converter)
        values = to_device(device, drawn.numpy())
        rows, results = DeviceRows(values, torch.ones_like(values[:, 0]).float()), list[Tensor]()
        for other in OUTPUT_DTYPES[1:]:
            quantized = converter.quantize(rows, other)
            results += [quantized.values, quantized.check][: 1 + (other in SCALED)]
        return results + [converter.encode(rows, texts, side).values for side in _SIDES]

    proof = try_path(CONVERSION, ON_DEVICE, convert, expected, _TOLERANCE)
    return (made[0] if made else None), proof
