"""Products with weights by the kernels in C, on a CPU with AVX-512 and without AMX.

They multiply as fast as oneDNN's, and are there for any number of rows, which oneDNN compiles anew
for each; of few rows, as a query has, they take three quarters to nine tenths of its time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from app.models.ops.native_library import LANES, Library, place

# As in products.c.
_PANEL = 64
_ACTIVATIONS = {None: 0, "gelu": 1, "relu": 2}


def fits(shape: torch.Size, activation: str | None) -> bool:
    """Whether the kernel multiplies with weights of `shape` `[columns, depth]`."""
    columns, depth = shape
    return columns % _PANEL == 0 and depth % LANES == 0 and activation in _ACTIVATIONS


def lay_out(weight: Tensor) -> Tensor:
    """A copy of `[columns, depth]` as panels of words `[columns / 64, words, 64]`."""
    words = weight.contiguous().view(torch.int32)
    return words.view(-1, _PANEL, words.shape[1]).transpose(1, 2).contiguous()


def make_linear(
    library: Library, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Callable[[Tensor], Tensor]:
    """`activation(x W + b)` in bfloat16; `weight` is `[columns, depth]`."""
    columns, depth = weight.shape
    panels = lay_out(weight)
    exact_bias = torch.zeros(columns) if bias is None else bias.float().contiguous()
    code = _ACTIVATIONS[activation]

    def linear(states: Tensor) -> Tensor:
        output = states.new_empty(len(states), columns)
        library.run(
            "multiply_bfloat16",
            place(states, torch.bfloat16), panels.data_ptr(), exact_bias.data_ptr(),
            output.data_ptr(), len(states), depth, columns, code,
        )  # fmt: skip
        return output

    return linear


def multiply_levels(
    library: Library,
    levels: Tensor,
    panels: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    dtype: torch.dtype,
    activation: str | None,
) -> Tensor:
    """`activation(scale x levels x weights + bias)` in `dtype`, float32 or bfloat16.

    `levels` is `[T, depth]` u8, `panels` is what `lay_out` made of s8.
    """
    rows, depth = levels.shape
    output = torch.empty(rows, len(scale), dtype=dtype)
    library.run(
        "multiply_levels",
        place(levels, torch.uint8), panels.data_ptr(), place(scale, torch.float32),
        place(bias, torch.float32), output.data_ptr(), dtype is torch.float32,
        rows, depth, len(scale), _ACTIVATIONS[activation],
    )  # fmt: skip
    return output
