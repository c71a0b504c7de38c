"""The operations on NVIDIA GPUs: PyTorch's operators, and attention over packed sequences."""

import torch

from app.models.attention.choose import FLASH_DTYPES
from app.models.ops.torch_backend import TorchBackend


class CudaBackend(TorchBackend):
    """The place for fused CUDA kernels: each overrides the operations that it computes."""

    name = "cuda"

    def __init__(self, dtype: torch.dtype, attention: str | None = None) -> None:
        super().__init__(attention or ("varlen" if dtype in FLASH_DTYPES else "sdpa"))
