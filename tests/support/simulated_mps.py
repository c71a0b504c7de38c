"""A simulated Apple GPU: fake tensors without numbers, with the errors of PyTorch for MPS.

Operators without an implementation for MPS raise `NotImplementedError`, and float64 a `TypeError`.
PyTorch's list of operators says which are implemented.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.support.fake_device import crosses, fake_tensors, is_composite, leaves

# The value of copies on the host.
ARRIVED = 0.5
_OPERATORS = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"


class SimulatedMps(TorchDispatchMode):
    """Checks every operator on the device; `called` has their names."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        if not any(isinstance(argument, FakeTensor) or _is_mps(argument) for argument in given):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            # PyTorch for CPUs cannot choose a kernel for other devices.
            return args[0].new_empty(*args[0].shape[:-1], args[2].shape[-1])
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        source = crosses(func, args, kwargs)
        if source is not None:
            return _copy(source, args, kwargs)
        name = func.name().removeprefix("aten::")
        if not _is_implemented(name):
            raise NotImplementedError(f"The operator 'aten::{name}' is not implemented for MPS")
        self.called.append(name)
        result = func(*args, **kwargs)
        if any(_is_float64(value) for value in leaves(result)):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        return result


def _copy(source: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy between host and device."""
    if "device" not in kwargs:
        target: Tensor = args[0]
        return target
    dtype = kwargs.get("dtype") or source.dtype
    if source.device.type == "cpu":
        return torch.empty(source.shape, dtype=dtype, device=kwargs["device"])
    with _disable_current_modes():
        return torch.full(source.shape, ARRIVED, dtype=dtype)


def _is_mps(argument: Any) -> bool:
    return isinstance(argument, torch.device) and argument.type == "mps"


def _is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.float64


@cache
def _is_implemented(name: str) -> bool:
    """Return whether an operator of PyTorch has an implementation for MPS."""
    _, _, rest = _operators().partition(f"\n- func: {name}(")
    entry = rest.partition("\n- func: ")[0]
    delegate = re.search(r"structured_delegate: (\S+)", entry)
    if delegate:
        return _is_implemented(delegate[1])
    _, has_kernels, kernels = entry.partition("dispatch:")
    return not has_kernels or bool(re.search(r"\bMPS\b.*:|\bComposite\w+:", kernels))


@cache
def _operators() -> str:
    return _OPERATORS.read_text("utf-8")


@contextmanager
def simulated_mps() -> Iterator[SimulatedMps]:
    """Simulate `torch.device("mps:0")` in the block; the number is needed."""
    mps = SimulatedMps()
    with ExitStack() as stack:
        stack.enter_context(fake_tensors("mps"))
        stack.enter_context(mps)
        yield mps
