"""Compares responses with expected ones, from the rules or from an idle server.

Numbers are compared by their absolute difference, or relative to the largest value of the vector or
score if that is above 1 (a logit, Qwen's raw states). A sparse weight that is missing on one side
counts as 0. Everything else must be equal, except times.
"""

import base64
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from tests.oracle.cases import Case

Answer = Mapping[str, Any]
_TIMES = frozenset({"processing_time_ms", "timings_ms"})
_SPARSE = ("/embeddings/sparse", "/vectors/sparse")
# The rounding of a text may depend on the shape of its batch, which chooses the kernel, and on the
# threads of its device; docs/models.md promises 1e-5 in float32. In bfloat16 both layers round
# several times to 2^-9 of a value; 2^-5 allows for sixteen of these. In int8 a sum that differs in
# its last bit may round to the next of 255 levels, in one of many channels.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2.0**-5, "int8": 2.0**-6}


@dataclass(frozen=True, slots=True)
class Encoded:
    """Numbers that are expected as raw bytes of a type in base64."""

    values: Any
    dtype: str

    def read(self, text: str) -> Any:
        kinds = {"float32": "<f4", "int8": "i1", "binary": "i1", "uint8": "u1", "ubinary": "u1"}
        return np.frombuffer(base64.b64decode(text), kinds[self.dtype])


@dataclass(slots=True)
class Comparison:
    """Collects the comparisons of responses."""

    tolerance: float
    compared: int = 0
    largest: float = 0.0
    farthest: str = ""
    wrong: list[str] = field(default_factory=list)

    def compare(self, case: Case, expected: Answer, content: bytes) -> None:
        """Compare a response."""
        actual = parse(content)
        self.compared += 1
        faults: list[str] = []
        order = [(-result["score"], result["index"]) for result in actual.get("results", ())]
        if order != sorted(order):
            faults.append("not by falling score")
        for pointer, distance in distances("", _by_index(expected), _by_index(actual)):
            if self.largest < distance < np.inf:
                self.largest, self.farthest = distance, f"{pointer} in request {case.number}"
            # Negated, because every comparison with NaN is false.
            if not distance <= self.tolerance:
                faults.append(f"{pointer} differs by {distance:.2e}")
        if faults:
            self.wrong.append(f"request {case.number} to {case.path}: {'; '.join(faults[:3])}")


def parse(content: bytes) -> Answer:
    """Parse the JSON of a response, with vectors as arrays, which are smaller."""
    answer: dict[str, Any] = orjson.loads(content)
    for item in answer.get("data", ()):
        if (vectors := item.get("embeddings")) is None:
            continue
        vectors |= {kind: _array(vectors[kind]) for kind in ("dense", "colbert")}
    return answer


def _array(values: Any) -> Any:
    if values is None:
        return None
    found = np.asarray(values)
    return found if found.dtype.kind == "i" else found.astype(np.float32)


def _by_index(answer: Answer) -> Answer:
    """Sort results by index, because passages with nearly equal scores may change places."""
    if "results" not in answer:
        return answer
    return {**answer, "results": sorted(answer["results"], key=lambda result: result["index"])}


def distances(
    pointer: str, expected: Any, actual: Any, unread: AbstractSet[str] = _TIMES
) -> Iterator[tuple[str, float]]:
    """Yield the distances of numbers by JSON pointer; infinity for other unequal values."""
    match expected:
        case Encoded():
            yield pointer, _distance(expected.values, expected.read(actual))
        case dict() if isinstance(actual, dict) and pointer.endswith(_SPARSE):
            left, right = (_weights(sparse) for sparse in (expected, actual))
            tokens = sorted(left.keys() | right.keys())
            pair = ([side.get(token, 0.0) for token in tokens] for side in (left, right))
            yield pointer, _distance(*pair)
        case dict() if isinstance(actual, dict):
            if alone := (expected.keys() ^ actual.keys()) - unread:
                yield f"{pointer} with {sorted(map(str, alone))} on one side only", np.inf
            for name in sorted((expected.keys() & actual.keys()) - unread):
                yield from distances(f"{pointer}/{name}", expected[name], actual[name], unread)
        case list() if isinstance(actual, list) and len(actual) == len(expected):
            for number, both in enumerate(zip(expected, actual, strict=True)):
                yield from distances(f"{pointer}/{number}", *both, unread)
        case np.ndarray() | np.generic() | float():
            yield pointer, _distance(expected, actual)
        case _ if type(expected) is not type(actual) or expected != actual:
            yield f"{pointer}, {str(actual)[:60]} and not {str(expected)[:60]},", np.inf


def _distance(expected: Any, actual: Any) -> float:
    """Return the largest difference, relative to the largest value if that is above 1."""
    left, right = np.asarray(expected), np.asarray(actual)
    whole = left.dtype.kind in "iu"
    if left.shape != right.shape or right.dtype.kind not in ("iu" if whole else "f"):
        return np.inf
    if not left.size:
        return 0.0
    distance = float(np.abs(np.subtract(left, right, dtype=np.float64)).max())
    # A value between two whole numbers may be rounded to either.
    return max(0.0, distance - 1) if whole else distance / max(1.0, float(np.abs(left).max()))


def _weights(sparse: Answer) -> dict[int, float]:
    """Return the weights by token, from either shape."""
    if sparse.keys() == {"indices", "values"}:
        return dict(zip(sparse["indices"], sparse["values"], strict=True))
    return {int(token): weight for token, weight in sparse.items()}
