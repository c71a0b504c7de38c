"""`app.models.ops.row_ops` by the kernels in C."""

import torch
from torch import Tensor

from app.models.ops.native_library import LANES, Library, load_library, place
from app.models.ops.row_ops import Ending, PyTorchRows, RoundedLevels, RoundedRows, Rows


class NativeRows:
    """Passes over rows in C, for widths that are multiples of 16."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def round_levels(self, states: Tensor, lowest: float, highest: float) -> RoundedLevels:
        """Implement `Rows`."""
        levels = torch.empty_like(states, dtype=torch.uint8)
        far = torch.empty(len(states), dtype=torch.bool)
        self._library.run(
            "round_levels",
            place(states, torch.float32), levels.data_ptr(), far.data_ptr(),
            *states.shape, lowest, highest,
        )  # fmt: skip
        return RoundedLevels(levels, far)

    def round_rows(self, states: Tensor) -> RoundedRows:
        """Implement `Rows`."""
        levels = torch.empty_like(states, dtype=torch.uint8)
        scale, minimum = torch.empty(2, len(states), 1)
        self._library.run(
            "round_rows",
            place(states, states.dtype), states.dtype is torch.bfloat16,
            levels.data_ptr(), scale.data_ptr(), minimum.data_ptr(), *states.shape,
        )  # fmt: skip
        return RoundedRows(levels, scale, minimum)

    def norm_product(
        self, product: Tensor, rows: RoundedRows, residual: Tensor, ending: Ending
    ) -> Tensor:
        """Implement `Rows`."""
        norm = ending.norm
        each = (
            product, rows.scale, rows.minimum, residual,
            ending.sums, ending.unit, ending.constant, norm.weight, norm.bias,
        )  # fmt: skip
        places = (place(tensor, torch.float32) for tensor in each)
        self._library.run("norm_product", *places, norm.epsilon, *product.shape)
        return product


def choose_rows(*widths: int) -> Rows:
    """The fastest that runs here on rows of these widths."""
    library = load_library()
    fits = all(width % LANES == 0 for width in widths)
    return PyTorchRows() if library is None or not fits else NativeRows(library)
