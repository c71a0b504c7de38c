"""Long texts in windows, and the forward of models that read them.

Windows overlap by a quarter, so that every token but the first and last of a text is read with at
least an eighth of a window on either side.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch

from smart_embedder.errors import InferenceError
from smart_embedder.hardware.transfer import DeviceRows, not_finite_error, start_copies
from smart_embedder.models.runner import DeviceModel
from smart_embedder.requests import Outputs
from smart_embedder.results import FloatArray
from smart_embedder.tokens import TokenIds

# The share of a window that the next one reads, too.
_OVERLAP = 4


class WindowModel(DeviceModel[FloatArray]):
    """Implements `DeviceModel` for models that return rows of scores of each window."""

    @abstractmethod
    def _score(
        self, states: torch.Tensor, places: list[slice], windows: list[TokenIds]
    ) -> list[torch.Tensor]:
        """Return the scores of each window, `[rows, columns]`, whose states are at its place."""

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[FloatArray | InferenceError]]:
        """Implement `DeviceModel`."""
        del outputs
        packed = self._backbone.pack(sequences)
        offsets = packed.offsets.tolist()
        places = [slice(offsets[row], offsets[row + 1]) for row in packed.unpack_order]
        scores = self._score(self._backbone.forward(packed), places, sequences)
        copies = start_copies([DeviceRows.of(torch.cat(scores))], packed.tokens)
        borders = np.cumsum([len(rows) for rows in scores])[:-1]

        def collect() -> list[FloatArray | InferenceError]:
            (rows,) = copies()
            parts = zip(np.split(rows.values, borders), np.split(rows.finite, borders), strict=True)
            return [values if finite.all() else not_finite_error() for values, finite in parts]

        return collect


def divide(count: int, size: int) -> list[slice]:
    """Divide this many tokens into windows of at most `size`."""
    if count <= size:
        return [slice(0, count)] if count else []
    starts = range(0, count - size, size - size // _OVERLAP)
    return [slice(start, start + size) for start in (*starts, count - size)]


def keep_middles(windows: list[slice], results: Sequence[FloatArray]) -> FloatArray:
    """Join the rows of each window without those that are nearer to the middle of another."""
    kept, begin = [], 0
    for index, (window, rows) in enumerate(zip(windows, results, strict=True)):
        is_last = index + 1 == len(windows)
        end = window.stop if is_last else (window.stop + windows[index + 1].start) // 2
        kept.append(rows[begin - window.start : end - window.start])
        begin = end
    return np.concatenate(kept)
