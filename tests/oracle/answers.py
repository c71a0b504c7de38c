"""Is an answer the one that was expected: of the truth, or of an idle server?

Numbers are compared by their absolute difference where a vector's or score's largest value is at
most 1, and relative to that value above (a logit, Qwen's raw states). A sparse weight that is
missing on one side counts as 0. Everything else, but for the times, must be equal.
"""

import base64
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from tests.oracle.cases import KINDS, Body, Case

Answer = Mapping[str, Any]
_TIMES = frozenset({"processing_time_ms", "timings_ms"})
_SPARSE = ("/embeddings/sparse", "/vectors/sparse")
# A text's rounding may depend on the shape of its batch, by which a kernel is chosen. In bfloat16
# each of the two layers rounds several times to 2^-9 of a value; 2^-5 are sixteen of those. In int8
# a sum that differs in its last bit may round to the next of 255 levels, in one of many channels.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2.0**-5, "int8": 2.0**-6}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Numbers that are expected as raw bytes in base64, of a type."""

    values: Any
    dtype: str

    def read(self, text: str) -> Any:
        kinds = {"float32": "<f4", "int8": "i1", "binary": "i1", "uint8": "u1", "ubinary": "u1"}
        return np.frombuffer(base64.b64decode(text), kinds[self.dtype])


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
        for what, distance in distances("", _by_index(expected), _by_index(actual)):
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


def distances(
    place: str, expected: Any, actual: Any, unread: AbstractSet[str] = _TIMES
) -> Iterator[tuple[str, float]]:
    """How far apart numbers are, by where; what else is not equal is so infinitely."""
    match expected:
        case Encoded():
            yield place, _apart(expected.values, expected.read(actual))
        case dict() if isinstance(actual, dict) and place.endswith(_SPARSE):
            left, right = (_weights(each) for each in (expected, actual))
            tokens = sorted(left.keys() | right.keys())
            pair = ([side.get(token, 0.0) for token in tokens] for side in (left, right))
            yield place, _apart(*pair)
        case dict() if isinstance(actual, dict):
            if alone := (expected.keys() ^ actual.keys()) - unread:
                yield f"{place} with {sorted(map(str, alone))} on one side only", np.inf
            for name in sorted((expected.keys() & actual.keys()) - unread):
                yield from distances(f"{place}/{name}", expected[name], actual[name], unread)
        case list() if isinstance(actual, list) and len(actual) == len(expected):
            for number, both in enumerate(zip(expected, actual, strict=True)):
                yield from distances(f"{place}/{number}", *both, unread)
        case np.ndarray() | np.generic() | float():
            yield place, _apart(expected, actual)
        case _ if type(expected) is not type(actual) or expected != actual:
            yield f"{place}, {str(actual)[:60]} and not {str(expected)[:60]},", np.inf


def _apart(expected: Any, actual: Any) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    left, right = np.asarray(expected), np.asarray(actual)
    whole = left.dtype.kind in "iu"
    if left.shape != right.shape or right.dtype.kind not in ("iu" if whole else "f"):
        return np.inf
    if not left.size:
        return 0.0
    apart = float(np.abs(np.subtract(left, right, dtype=np.float64)).max())
    # What lies between two whole numbers may be rounded to either.
    return max(0.0, apart - 1) if whole else apart / max(1.0, float(np.abs(left).max()))


def _weights(sparse: Answer) -> dict[int, float]:
    """Weights by token, from either of the two shapes."""
    if sparse.keys() == {"indices", "values"}:
        return dict(zip(sparse["indices"], sparse["values"], strict=True))
    return {int(token): weight for token, weight in sparse.items()}
