"""The operations on NVIDIA GPUs where the kernels of `csrc/row_ops.cu` are compiled."""

import torch
from torch import Tensor

from app.models.ops.arguments import LayerNorm, RmsNorm, RotaryEmbedding
from app.models.ops.cuda_backend import CudaBackend
from app.models.ops.cuda_kernels import CudaKernels, Wide
from app.models.ops.torch_backend import SHORTEST_ROW

# As in row_ops.cu: a thread holds so many numbers, and a block has at most 1,024 threads.
_EIGHT = 8
_WARP = 32
_WIDEST_ROW = 8192
_MOST_WARPS = 32
_GATE_THREADS = 256
_ALIGNMENT = 16


class FusedCudaBackend(CudaBackend):
    """Sums are in float32. Rows that a kernel does not take are left to PyTorch's operators."""

    name = "fused"

    def __init__(
        self,
        kernels: CudaKernels,
        device: torch.device,
        dtype: torch.dtype,
        attention: str | None = None,
    ) -> None:
        super().__init__(device, dtype, attention)
        self._kernels = kernels

    def embed(
        self, indices: tuple[Tensor, Tensor], tables: tuple[Tensor, Tensor], norm: LayerNorm
    ) -> Tensor:
        """Implement `Backend`; where a table has no such row, the row is NaN."""
        if not _fit(*tables, norm.weight, norm.bias):
            return super().embed(indices, tables, norm)
        (first, second), (tokens, positions) = indices, tables
        width = tokens.shape[1]
        output = tokens.new_empty(len(first), width)
        self._kernels.run(
            "embed", len(first), _threads(width),
            first, tokens, second, positions, norm.weight, norm.bias, output,
            norm.epsilon, len(tokens), len(positions), width,
        )  # fmt: skip
        return output

    def add_norm(self, states: Tensor, residual: Tensor, norm: LayerNorm) -> Tensor:
        """Implement `Backend`."""
        if not _fit(states, residual, norm.weight, norm.bias):
            return super().add_norm(states, residual, norm)
        rows, width = states.shape
        self._kernels.run(
            "add_norm", rows, _threads(width),
            states, residual, norm.weight, norm.bias, norm.epsilon, width,
        )  # fmt: skip
        return states

    def rms_norm(self, states: Tensor, norm: RmsNorm) -> Tensor:
        """Implement `Backend`."""
        if not _fit(states, norm.weight):
            return super().rms_norm(states, norm)
        rows, width = states.shape
        output = torch.empty_like(states)
        self._kernels.run(
            "rms_norm", rows, _threads(width), states, norm.weight, output, norm.epsilon, width
        )
        return output

    def rotary(self, states: Tensor, norm: RmsNorm, embedding: RotaryEmbedding) -> None:
        """Implement `Backend`."""
        heads, width = norm.weight.shape
        alike = norm.weight.dtype is states.dtype
        if not (alike and states.is_contiguous()):
            super().rotary(states, norm, embedding)
            return
        self._kernels.run(
            "rotary", len(states), min(heads, _MOST_WARPS) * _WARP,
            states, norm.weight, embedding.cosines, embedding.sines, norm.epsilon,
            states.stride(0), heads, width,
        )  # fmt: skip

    def gate(self, states: Tensor) -> Tensor:
        """Implement `Backend`."""
        rows, width = states.shape[0], states.shape[1] // 2
        if width % _EIGHT or not _lies_well(states):
            return super().gate(states)
        output = states.new_empty(rows, width)
        count = rows * width // _EIGHT
        blocks = -(-count // _GATE_THREADS)
        self._kernels.run("gate", blocks, _GATE_THREADS, states, output, Wide(count), width)
        return output

    def unit_rows(
        self, states: Tensor, dtype: torch.dtype, indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Implement `Backend`."""
        # The mean of states, which is float32, has another type than the kernels are compiled for.
        if states.dtype is not self._dtype or not _fit(states):
            return super().unit_rows(states, dtype, indices)
        rows, width = len(states if indices is None else indices), states.shape[1]
        output = states.new_empty(rows, width, dtype=dtype)
        lengths = states.new_empty(rows, dtype=torch.float32)
        self._kernels.run(
            "unit_rows", rows, _threads(width), states, indices, output, lengths,
            SHORTEST_ROW, int(dtype is torch.float16), width,
        )  # fmt: skip
        return output, lengths


def _fit(states: Tensor, *others: Tensor) -> bool:
    width = states.shape[1]
    fits = len(states) > 0 and width % _EIGHT == 0 and width <= _WIDEST_ROW
    alike = all(each.dtype is states.dtype for each in others)
    return fits and alike and all(map(_lies_well, (states, *others)))


def _lies_well(tensor: Tensor) -> bool:
    """Whether its rows begin where a thread can read eight numbers at once."""
    offset = tensor.storage_offset() * tensor.element_size()
    return tensor.is_contiguous() and offset % _ALIGNMENT == 0


def _threads(width: int) -> int:
    return -(-width // (_EIGHT * _WARP)) * _WARP
