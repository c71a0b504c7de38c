"""The attention that the setting ATTENTION names."""

import torch

from app.errors import StartupError
from app.models.attention.matmul import matmul
from app.models.attention.reference import Attention, eager
from app.models.attention.sdpa import sdpa
from app.models.attention.varlen import FLASH_MODULES, load_flash_attention, load_varlen

FLASH_DTYPES = {torch.float16, torch.bfloat16}
_EVERYWHERE: dict[str, Attention] = {"sdpa": sdpa, "matmul": matmul, "eager": eager}


def require_runs(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise `StartupError` where the attention `name` cannot run on `device` in `dtype`."""
    needs_flash = name == "varlen" or name in FLASH_MODULES
    if needs_flash and not (device.type == "cuda" and dtype in FLASH_DTYPES):
        needed = "an NVIDIA GPU and float16 or bfloat16"
    elif name == "native" and (device.type != "cpu" or dtype is not torch.bfloat16):
        needed = "a CPU and DTYPE bfloat16 or int8"
    else:
        return
    raise StartupError(
        f"ATTENTION={name} needs {needed}, but the model runs in "
        f"{str(dtype).removeprefix('torch.')} on {device.type}; set ATTENTION to auto"
    )


def load_attention(name: str) -> Attention:
    """The attention `name`; raises `StartupError` where what it needs is not installed.

    `native` is that of `NativeBackend`, which loads it by itself.
    """
    if name == "varlen":
        return load_varlen()
    if name in FLASH_MODULES:
        return load_flash_attention(name)
    if name == "native":
        raise StartupError(
            "ATTENTION=native needs the kernels, which are not built, or not for this processor: "
            "python -m app.models.ops.build builds them"
        )
    return _EVERYWHERE[name]
