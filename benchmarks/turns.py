"""Taking turns on one workload, because the speed of a shared machine drifts."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence


def turns(rounds: Mapping[str, int]) -> Iterator[tuple[int, str]]:
    """(round, name) in the order A B C A B C; a name leaves when its rounds are over."""
    for number in range(max(rounds.values(), default=0)):
        for name, wanted in rounds.items():
            if number < wanted:
                yield number, name


def measure(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each, round by round; `prepare` comes before every turn and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _, name in turns(dict.fromkeys(runs, rounds)):
        prepare()
        began = time.perf_counter()
        runs[name]()
        seconds[name].append(time.perf_counter() - began)
    return seconds


def rounds_of(seconds: Sequence[float]) -> str:
    """The median, and what it is the median of."""
    return f"{statistics.median(seconds):.2f} s ({', '.join(f'{each:.2f}' for each in seconds)})"
