"""The choice of a backend: which implementations this machine has for a device and a dtype."""

import torch

from smart_embedder.kernels.attention import load_attention, require_runs
from smart_embedder.kernels.backend import Backend, onednn_backend, torch_backend
from smart_embedder.kernels.cuda import cuda_backend, fused_backend, load_kernels
from smart_embedder.kernels.native import FORMATS, load_library, native_backend


def choose_backend(device: torch.device, dtype: torch.dtype, attention: str = "auto") -> Backend:
    """The fastest backend on this machine; the setting ATTENTION replaces only its attention.

    Raises `StartupError` if that attention cannot run on `device` in `dtype`.
    """
    backend = _fastest(device, dtype)
    if attention == "auto":
        return backend
    require_runs(attention, device, dtype)
    return with_attention(backend, attention)


def with_attention(backend: Backend, name: str) -> Backend:
    """The backend with another attention; raises `StartupError` if that is not installed."""
    own = backend.table["attention"].get(name)
    return backend.faster(name, attention=own or load_attention(name))


def _fastest(device: torch.device, dtype: torch.dtype) -> Backend:
    if device.type == "cuda":
        kernels = load_kernels(device, dtype)
        backend = cuda_backend(device, dtype)
        return backend if kernels is None else fused_backend(kernels, dtype, backend)
    if device.type != "cpu":
        return torch_backend()
    library = load_library() if dtype in FORMATS else None
    return onednn_backend(dtype) if library is None else native_backend(library, dtype)
