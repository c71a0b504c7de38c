"""Linear layers: on a CPU weights laid out once, bias and activation within the product.

A layer takes `[T, in]` and returns `[T, out]`. `reference` is what the others must agree with.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from app.models.ops import native_gemm as native_products
from app.models.ops.native_library import load_without_amx

Linear = Callable[[Tensor], Tensor]
# How oneDNN names the activations of transformers: (operation, algorithm).
ACTIVATIONS = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
# Any number of rows runs on weights that were laid out for this many.
_LAYOUT_ROWS = 256


def make_linear(layers: list[nn.Linear], activation: str | None = None) -> Linear:
    """The fastest way to compute `layers`, which read the same input, side by side."""
    weight = _join([layer.weight for layer in layers]).detach()
    bias = None if layers[0].bias is None else _join([layer.bias for layer in layers]).detach()
    if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
        return reference(weight, bias, activation)
    library = load_without_amx()
    if library is not None and native_products.fits(weight.shape, activation):
        return native_products.make_linear(library, weight, bias, activation)
    make = packed if can_pack_bfloat16() else reference
    return make(weight, bias, activation)


def can_pack_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor; elsewhere PyTorch knows best."""
    native = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return bool(native and torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def reference(weight: Tensor, bias: Tensor | None, activation: str | None) -> Linear:
    """PyTorch's own product, then the activation."""
    operation, algorithm = ACTIVATIONS[activation]

    def linear(states: Tensor) -> Tensor:
        product = functional.linear(states, weight, bias)
        match operation:
            case "gelu":
                return functional.gelu(product, approximate=algorithm)
            case "relu":
                return product.relu_()
        return product

    return linear


def packed(weight: Tensor, bias: Tensor | None, activation: str | None) -> Linear:
    """The product on weights in oneDNN's own layout, into which each call else reorders them.

    These are the operators that PyTorch's compiler emits for frozen weights.
    """
    operation, algorithm = ACTIVATIONS[activation]
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)  # noqa: SLF001
    compute = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001

    def linear(states: Tensor) -> Tensor:
        product: Tensor = compute(states, layout, bias, operation, [], algorithm)
        return product

    return linear


def _join(tensors: list[Tensor]) -> Tensor:
    """One behind the other; a tensor alone stays where it is, which may be a mapped file."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
