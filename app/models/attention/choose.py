"""The attention that the setting ATTENTION names."""

import torch

from app.errors import StartupError
from app.models.attention.matmul import matmul
from app.models.attention.reference import Attention, eager
from app.models.attention.sdpa import sdpa
from app.models.attention.varlen import FLASH_MODULES, load_flash_attention, varlen

FLASH_DTYPES = {torch.float16, torch.bfloat16}
_FLASH_CAPABILITY = (8, 0)
_BY_NAME: dict[str, Attention] = {
    "varlen": varlen,
    "sdpa": sdpa,
    "matmul": matmul,
    "eager": eager,
}


def flash_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` has FlashAttention's kernels for `dtype`: NVIDIA's Ampere or newer."""
    if device.type != "cuda" or dtype not in FLASH_DTYPES:
        return False
    return torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY


def require_runs(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `StartupError` where the attention `name` cannot run on `device` in `dtype`."""
    needs_flash = name == "varlen" or name in FLASH_MODULES
    if needs_flash and not flash_runs(device, dtype):
        needed = "an NVIDIA GPU of compute capability 8.0 or newer, and float16 or bfloat16"
    elif name == "native" and device.type != "cpu":
        needed = "a CPU"
    else:
        return
    raise StartupError(
        f"ATTENTION={name} needs {needed}, but the model runs in "
        f"{str(dtype).removeprefix('torch.')} on {_name(device)}; set ATTENTION to auto"
    )


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device.type}, which has {major}.{minor}"


def load_attention(name: str) -> Attention:
    """The attention `name`; raises `StartupError` if its package or kernel is missing.

    `native` belongs to `NativeBackend`, which loads it by itself.
    """
    if name in FLASH_MODULES:
        return load_flash_attention(name)
    if name == "native":
        raise StartupError(
            "ATTENTION=native needs the kernels, which are not built, or not for this processor: "
            "python -m app.models.ops.build builds them"
        )
    return _BY_NAME[name]
