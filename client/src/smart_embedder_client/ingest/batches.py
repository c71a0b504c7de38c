"""Items into batches by what they weigh."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def batches(
    items: Iterable[Item], weight: Callable[[Item], int], most: int, most_items: int | None = None
) -> Iterator[list[Item]]:
    """Batches of at most `most` together; an item that weighs more is alone."""
    batch: list[Item] = []
    total = 0
    for item in items:
        heavier = total + weight(item)
        if batch and (heavier > most or len(batch) == most_items):
            yield batch
            batch, heavier = [], weight(item)
        batch.append(item)
        total = heavier
    if batch:
        yield batch
