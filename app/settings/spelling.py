"""How much two names differ, for telling which one was probably meant."""

from collections.abc import Iterable


def distance(name: str, other: str) -> int:
    """Letters to add, drop, replace or swap with their neighbour to make one of the other."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(name, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            steps = [last[j] + 1, row[-1] + 1, last[j - 1] + (letter != wanted)]
            if i > 1 and j > 1 and (letter, name[i - 2]) == (other[j - 2], wanted):
                steps.append(before[j - 2] + 1)
            row.append(min(steps))
        before, last = last, row
    return last[-1]


def nearest(name: str, known: Iterable[str]) -> str:
    """Which of the `known` names, at least one, differs least."""
    return min(sorted(known), key=lambda each: distance(name, each))
