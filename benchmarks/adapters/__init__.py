"""One module for each engine: how it is loaded, called at its best, and its answer read.

A worker imports the one that it is asked for, inside an environment that has that engine's package.
Each offers `PACKAGE`, the name of that package, and `Adapter(folder, precision)`, whose
`encode(texts, setting)` is timed, and whose `vectors(answer)` makes `Vectors` of what it answers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a user of the engine may choose: texts in a forward, and how its threads are used.

    Without a `batch` the engine's own default holds.
    """

    batch: int | None = None
    hint: str = ""

    def __str__(self) -> str:
        batch = "default" if self.batch is None else f"batch {self.batch}"
        return f"{batch} {self.hint}".rstrip()


@dataclass(frozen=True, slots=True)
class Vectors:
    """What of an engine's answer is compared: `dense` [N, width] and `colbert` [tokens, width].

    Both are unit length and in the order of the texts, whose ColBERT vectors lie end to end.
    """

    dense: FloatArray
    colbert: FloatArray | None = None


def by_length(texts: Sequence[str], batch: int) -> Iterator[list[int]]:
    """Places of texts in batches of near-equal length, the longest first."""
    places = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    for start in range(0, len(places), batch):
        yield places[start : start + batch]
