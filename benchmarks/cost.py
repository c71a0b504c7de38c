"""How many floating-point operations bge-m3's outputs take, whatever an engine spends on padding.

A product of `[m, k]` and `[k, n]` counts 2mkn. Softmax, norms and activations are left out: they
are a small part of the whole, and no matrix unit computes them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Encoder:
    """The sizes of an XLM-RoBERTa encoder that decide its cost."""

    hidden: int
    layers: int
    inner: int

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The sizes in a checkpoint's config.json."""
        config = json.loads((folder / "config.json").read_text())
        return cls(config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"])

    def flop(self, lengths: Iterable[int], *, heads: bool = True) -> int:
        """Of texts with that many tokens, with or without the sparse and the ColBERT head."""
        return sum(self._text(length) + heads * self._heads(length) for length in lengths)

    def _text(self, length: int) -> int:
        # Four projections of attention, two of the feed-forward; then scores and their values.
        linear = 4 * self.hidden * self.hidden + 2 * self.hidden * self.inner
        attention = 2 * length * self.hidden
        return 2 * length * (linear + attention) * self.layers

    def _heads(self, length: int) -> int:
        sparse, colbert = self.hidden, self.hidden * self.hidden
        return 2 * (length * sparse + (length - 1) * colbert)
