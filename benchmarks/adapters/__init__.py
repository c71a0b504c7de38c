"""One module for each engine: load it, call it in its fastest way, and read its output.

A worker imports one of them, in an environment that has the engine's package. Each module has
`PACKAGE`, the name of that package, and `Adapter(folder, precision)`: its `encode(texts, setting)`
is timed, and its `vectors(output)` converts the output to `Vectors`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setting:
    """Options of an engine: texts in a forward (None: the default), and OpenVINO's hint."""

    batch: int | None = None
    hint: str = ""

    def __str__(self) -> str:
        batch = "default" if self.batch is None else f"batch {self.batch}"
        return f"{batch} {self.hint}".rstrip()


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors to compare: `dense` [N, width] and `colbert` [tokens of all texts, width].

    Both have unit length and the order of the texts.
    """

    dense: FloatArray
    colbert: FloatArray | None = None


def batch_by_length(texts: Sequence[str], batch: int) -> Iterator[list[int]]:
    """Yield the indices of texts in batches of similar length, the longest first."""
    indices = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    for start in range(0, len(indices), batch):
        yield indices[start : start + batch]
