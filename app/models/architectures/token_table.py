"""What tokens are looked up in, which is half of a model like bge-m3."""

import torch
from torch import Tensor
from torch.nn import functional


class TokenTable:
    """Maps token ids `[T]` to their rows `[T, width]` in `dtype`.

    The rows, `[vocabulary, width]`, may still be those of the checkpoint's file. A forward reads
    few of them, and to round and copy them all takes long: that is for `settle`, which changes no
    result. Those that may stay remain in the file for good.
    """

    def __init__(self, rows: Tensor, dtype: torch.dtype, *, stays: bool) -> None:
        self._rows = rows
        self._dtype = dtype
        self._stays = stays

    def __call__(self, token_ids: Tensor) -> Tensor:
        """The rows of the tokens, rounded."""
        return functional.embedding(token_ids, self._rows).to(self._dtype)

    def copied_to(self, dtype: torch.dtype) -> "TokenTable":
        """The same in `dtype`, and not to stay in its file."""
        return TokenTable(self._rows, dtype, stays=False)

    def settle(self) -> None:
        """Leave the file; lookups may run beside it."""
        if not self._stays:
            self._rows = self._rows.to(self._dtype, copy=True)
            self._stays = True
