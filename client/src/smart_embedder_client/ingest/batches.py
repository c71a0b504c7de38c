"""Items into batches by what they weigh."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(slots=True)
class Pace:
    """How much is done at a time, so that it takes about two seconds.

    A run that is killed again and again then loses little each time, on a slow machine, too.
    `size` is at most doubled or halved at once.
    """

    size: int
    least: int
    most: int

    def record(self, size: int, seconds: float) -> None:
        """Adapt to how long so much has taken; little of it tells nothing."""
        if 2 * size >= self.size:
            factor = min(max(_SECONDS / max(seconds, 0.001), 0.5), 2.0)
            self.size = min(max(int(self.size * factor), self.least), self.most)


_SECONDS = 2.0


def batches(
    items: Iterable[Item],
    weight: Callable[[Item], int],
    most: Callable[[], int],
    most_items: int | None = None,
) -> Iterator[list[Item]]:
    """Batches of at most `most()` together, asked again for each item; a heavier one is alone."""
    batch: list[Item] = []
    total = 0
    for item in items:
        heavier = total + weight(item)
        if batch and (heavier > most() or len(batch) == most_items):
            yield batch
            batch, heavier = [], weight(item)
        batch.append(item)
        total = heavier
    if batch:
        yield batch
