"""Taking turns on one workload, because the speed of a shared machine drifts."""

from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def turns(rounds: Mapping[Name, int]) -> Iterator[Name]:
    """Names in the order A B C A B C; one leaves when its rounds are over."""
    for number in range(max(rounds.values(), default=0)):
        for name, wanted in rounds.items():
            if number < wanted:
                yield name
