"""PyTorch's fake tensors on a device that this machine lacks, for simulated devices."""

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_TYPES = {"cuda": 1, "mps": 13, "meta": 14}
_torch_load = torch.load


@contextmanager
def fake_tensors(device_type: str) -> Iterator[None]:
    """Let tensors on such a device have shape, dtype and device, but no numbers, in the block."""
    with ExitStack() as stack:
        stack.enter_context(_device_guard(_TYPES[device_type]))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(patch.object(torch, "load", _load))
        # A module's parameters become fake tensors instead of holding one.
        stack.enter_context(
            patch.object(torch.__future__, "_overwrite_module_params_on_conversion", new=True)
        )
        yield


@contextmanager
def _device_guard(device_type: int) -> Iterator[None]:
    """Use the device guard of `meta`, because PyTorch for CPUs has none for other devices."""
    guards = (ctypes.c_void_p * 32).in_dll(ctypes.CDLL(str(_LIBRARY)), _GUARDS)
    before = guards[device_type]
    guards[device_type] = before or guards[_TYPES["meta"]]
    yield
    guards[device_type] = before


def _load(*arguments: Any, **options: Any) -> Any:
    """Read numbers, too: under fake tensors PyTorch would read only shapes."""
    with _disable_current_modes():
        return _torch_load(*arguments, **options)


def is_composite(func: Any) -> bool:
    """Return whether an operator calls other operators on every device."""
    composite = torch._C._dispatch_has_kernel_for_dispatch_key
    return func.namespace == "aten" and composite(func.name(), "CompositeImplicitAutograd")


def leaves(value: Any) -> list[Any]:
    """List all values in nested arguments or results."""
    return torch.utils._pytree.tree_leaves(value)


def crosses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor that is copied between host and device, if one is."""
    if func is torch.ops.aten.copy_.default:
        source, target = args[1], args[0].device
    elif func is torch.ops.aten._to_copy.default:
        source, target = args[0], kwargs.get("device") or args[0].device
    else:
        return None
    return source if source.device.type != target.type else None
