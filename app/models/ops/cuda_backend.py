"""The operations on NVIDIA GPUs: PyTorch's operators, and attention over packed sequences."""

import torch
from torch import Tensor, nn

from app.models.attention.choose import flash_runs
from app.models.attention.memory_efficient import memory_efficient
from app.models.attention.reference import Attention
from app.models.ops.arguments import AddLinear
from app.models.ops.torch_backend import TorchBackend


class CudaBackend(TorchBackend):
    """Attention, and products that are added to their residual as they are computed."""

    name = "cuda"

    def __init__(
        self, device: torch.device, dtype: torch.dtype, attention: str | None = None
    ) -> None:
        self._dtype = dtype
        super().__init__(attention or ("varlen" if flash_runs(device, dtype) else "sdpa"))
        # Of large sums in half precision the last bits would depend on how cuBLAS divides the work.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def load_attention(self, name: str) -> Attention:
        """As that of `TorchBackend`."""
        return memory_efficient if name == "sdpa" else super().load_attention(name)

    def add_linear(self, layer: nn.Linear) -> AddLinear:
        """Implement `Backend`."""
        if layer.bias is not None:
            return super().add_linear(layer)
        weight = layer.weight.detach().t()

        def add_linear(states: Tensor, residual: Tensor) -> Tensor:
            return residual.addmm_(states, weight)

        return add_linear
