"""Whether every path of every operation computes what it should on this machine."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from smart_embedder.models.device.choose import (
    choose_device,
    choose_dtype,
    cpu_has_bfloat16,
    cpu_has_int8,
)
from smart_embedder.models.ops.choose import choose_backend
from smart_embedder.models.ops.proof import (
    DECODER,
    ENCODER,
    GPU_ENCODER,
    QUANTIZED_ENCODER,
    Proof,
    Shapes,
    Trial,
)
from smart_embedder.settings import INT8

# Those of bge-m3 and Qwen3-0.6B.
_ENCODER_SHAPES = Shapes(1024, 4096, 16, 16, 64, "gelu")
_DECODER_SHAPES = Shapes(1024, 3072, 16, 8, 128, bias=False, causal=True)


@dataclass(frozen=True, slots=True)
class PathRow:
    """The proof of one path for one kind of model in one number format."""

    model: str
    dtype: str
    proof: Proof


def path_rows(device_name: str) -> Iterator[PathRow]:
    """One for each path that could run on the device of that name."""
    device = choose_device(device_name)
    for dtype in _dtypes(device):
        encoder = ENCODER if device.type == "cpu" else GPU_ENCODER
        backend, name = choose_backend(device, dtype), str(dtype).removeprefix("torch.")
        for model, shapes, operations in (
            ("encoder", _ENCODER_SHAPES, encoder),
            ("decoder", _DECODER_SHAPES, DECODER),
        ):
            for proof in Trial(backend, shapes, device, dtype).every_proof(operations):
                yield PathRow(model, name, proof)
    if device.type == "cpu" and cpu_has_int8():
        dtype = choose_dtype(INT8, device)
        trial = Trial(choose_backend(device, dtype), _ENCODER_SHAPES, device, dtype)
        for proof in trial.every_proof(QUANTIZED_ENCODER):
            yield PathRow("encoder", INT8, proof)


def _dtypes(device: torch.device) -> list[torch.dtype]:
    if device.type == "cpu":
        return [torch.float32, torch.bfloat16] if cpu_has_bfloat16() else [torch.float32]
    chosen = (choose_dtype("auto", device, qwen=qwen) for qwen in (False, True))
    return list(dict.fromkeys([*chosen, torch.float32]))


def print_paths(rows: list[PathRow]) -> None:
    """The rows, and how many hold."""
    header = (
        f"{'Model':9}{'Format':10}{'Operation':21}{'Path':19}{'Difference':>11}{'Tolerance':>11}"
    )
    print(header)
    for row in rows:
        proof = row.proof
        verdict = "ok" if proof.holds else f"refused: it {proof.reason} {proof.message}".rstrip()
        names = f"{row.model:9}{row.dtype:10}{proof.operation:21}{proof.path:19}"
        print(f"{names}{proof.difference:11.1e}{proof.tolerance:11.0e}  {verdict}")
    held = sum(row.proof.holds for row in rows)
    print(f"\n{held} of {len(rows)} paths compute what the plain reference does.\n")
