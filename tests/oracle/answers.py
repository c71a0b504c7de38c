"""Is an answer the one that the same request had on an idle server?

Numbers are compared by their absolute difference where a vector's or score's largest value is at
most 1, and relative to that value above (a logit, Qwen's raw states). A sparse weight that is
missing on one side counts as 0. Everything else, but for the times, must be equal.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from tests.oracle.cases import KINDS, Body, Case

Answer = Mapping[str, Any]
_TIMES = {"processing_time_ms", "timings_ms"}
# A text's rounding may depend on the shape of its batch, by which a kernel is chosen. In bfloat16
# each of the two layers rounds several times to 2^-9 of a value; 2^-5 are sixteen of those. In int8
# a sum that differs in its last bit may round to the next of 255 levels, in one of many channels.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2.0**-5, "int8": 2.0**-6}


@dataclass(slots=True)
class Comparison:
    """What was found in all answers so far."""

    tolerance: float
    texts: int = 0
    unasked: int = 0
    largest: float = 0.0
    farthest: str = ""
    wrong: list[str] = field(default_factory=list)

    def compare(self, case: Case, expected: Answer, content: bytes) -> None:
        """Add one answer."""
        actual = parse(content)
        self.texts += len(actual.get("data", ()))
        unasked = count_unasked(case.body, actual)
        self.unasked += unasked
        faults = [f"{unasked} texts with other kinds than were asked for"] if unasked else []
        order = [(-result["score"], result["index"]) for result in actual.get("results", ())]
        if order != sorted(order):
            faults.append("not by falling score")
        for what, distance in _distances("", _by_index(expected), _by_index(actual)):
            if self.largest < distance < np.inf:
                self.largest, self.farthest = distance, f"{what} in request {case.number}"
            # Not the other way round: NaN is smaller than nothing.
            if not distance <= self.tolerance:
                faults.append(f"{what} differs by {distance:.2e}")
        if faults:
            self.wrong.append(f"request {case.number} to {case.path}: {'; '.join(faults[:3])}")


def parse(content: bytes) -> Answer:
    """The JSON of an answer, with vectors as arrays, which are smaller."""
    answer: dict[str, Any] = orjson.loads(content)
    for item in answer.get("data", ()):
        vectors = item["embeddings"]
        vectors |= {kind: _array(vectors[kind]) for kind in ("dense", "colbert")}
    return answer


def _array(values: Any) -> Any:
    if values is None:
        return None
    found = np.asarray(values)
    return found if found.dtype.kind == "i" else found.astype(np.float32)


def count_unasked(body: Body, answer: Answer) -> int:
    """Texts that came back with a kind that was not asked for, or without one that was."""
    return sum(
        any((item["embeddings"][kind] is not None) != body[f"return_{kind}"] for kind in KINDS)
        for item in answer.get("data", ())
    )


def _by_index(answer: Answer) -> Answer:
    """Where scores are nearly equal, the order of passages may differ."""
    if "results" not in answer:
        return answer
    return {**answer, "results": sorted(answer["results"], key=lambda each: each["index"])}


def _distances(place: str, expected: Any, actual: Any) -> Iterator[tuple[str, float]]:
    """How far apart numbers are, by where; what else is not equal is so infinitely."""
    match expected:
        case dict() if isinstance(actual, dict) and place.endswith("/embeddings/sparse"):
            left, right = (_weights(each) for each in (expected, actual))
            tokens = sorted(left.keys() | right.keys())
            pair = ([side.get(token, 0.0) for token in tokens] for side in (left, right))
            yield place, _apart(*pair)
        case dict() if isinstance(actual, dict) and actual.keys() == expected.keys():
            for name in expected.keys() - _TIMES:
                yield from _distances(f"{place}/{name}", expected[name], actual[name])
        case list() if isinstance(actual, list) and len(actual) == len(expected):
            for number, both in enumerate(zip(expected, actual, strict=True)):
                yield from _distances(f"{place}/{number}", *both)
        case np.ndarray() | float() if actual is not None:
            yield place, _apart(expected, actual)
        case _ if type(expected) is not type(actual) or expected != actual:
            yield f"{place}, {str(actual)[:60]} and not {str(expected)[:60]},", np.inf


def _apart(expected: Any, actual: Any) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    left, right = np.asarray(expected), np.asarray(actual)
    if left.shape != right.shape or left.dtype.kind != right.dtype.kind:
        return np.inf
    if not left.size:
        return 0.0
    apart = float(np.abs(left - right).max())
    if left.dtype.kind == "i":
        # What lies between two whole numbers may be rounded to either.
        return max(0.0, apart - 1)
    return apart / max(1.0, float(np.abs(left).max()))


def _weights(sparse: Answer) -> dict[int, float]:
    """Weights by token, from either of the two shapes."""
    if sparse.keys() == {"indices", "values"}:
        return dict(zip(sparse["indices"], sparse["values"], strict=True))
    return {int(token): weight for token, weight in sparse.items()}
