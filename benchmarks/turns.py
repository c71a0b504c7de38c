"""Taking turns on one workload, because the speed of a shared machine drifts."""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def turns(rounds: Mapping[Name, int]) -> Iterator[Name]:
    """Names in the order A B C A B C; one leaves when its rounds are over."""
    for number in range(max(rounds.values(), default=0)):
        for name, wanted in rounds.items():
            if number < wanted:
                yield name


def measure(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name in turns(dict.fromkeys(runs, rounds)):
        began = time.perf_counter()
        runs[name]()
        seconds[name].append(time.perf_counter() - began)
    return seconds
