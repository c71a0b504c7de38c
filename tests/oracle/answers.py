"""Is an answer the one that the same request had on an idle server?

Numbers are compared by their absolute difference where a vector's or score's largest value is at
most 1, and relative to that value above (a logit, Qwen's raw states). A sparse weight that is
missing on one side counts as 0. Everything else, but for the times, must be equal.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from tests.oracle.cases import KINDS, Body, Case

Answer = Mapping[str, Any]
Numbers = npt.NDArray[np.float32]
_TIMES = {"processing_time_ms", "timings_ms"}
# A text's rounding may depend on the shape of its batch, by which a kernel is chosen. In bfloat16
# each of the two layers rounds several times to 2^-9 of a value; 2^-5 are sixteen of those. In int8
# a sum that differs in its last bit may round to the next of 255 levels, in one of many channels.
_WHOLE_NUMBERS = ("int8", "uint8")
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
        faults = list(_faults(case, expected, actual))
        for what, distance in _distances(case, expected, actual) if not faults else ():
            if distance > self.largest:
                self.largest, self.farthest = distance, f"{what} in request {case.number}"
            # Not the other way round: NaN is smaller than nothing.
            if not distance <= self.tolerance:
                faults.append(f"{what} differs by {distance:.2e}")
        if unasked:
            faults.append(f"{unasked} texts with kinds that were not asked for")
        if faults:
            self.wrong.append(f"request {case.number} to {case.path}: {'; '.join(faults[:3])}")


def parse(content: bytes) -> Answer:
    """The JSON of an answer, with vectors as arrays."""
    answer: dict[str, Any] = orjson.loads(content)
    for item in answer.get("data", ()):
        vectors = item["embeddings"]
        for kind in ("dense", "colbert"):
            if vectors[kind] is not None:
                vectors[kind] = np.asarray(vectors[kind], dtype=np.float32)
    return answer


def count_unasked(body: Body, answer: Answer) -> int:
    """Texts that came back with a kind of vector that was not asked for."""
    return sum(
        any(item["embeddings"][kind] is not None and not body[f"return_{kind}"] for kind in KINDS)
        for item in answer.get("data", ())
    )


def _faults(case: Case, expected: Answer, actual: Answer) -> Iterator[str]:
    """What is different apart from numbers."""
    lists = {"data", "results"}
    if actual.keys() != expected.keys():
        yield f"fields {sorted(actual)}"
    yield from (
        f"{name} is {actual.get(name)} and not {expected[name]}"
        for name in expected.keys() - _TIMES - lists
        if actual.get(name) != expected[name]
    )
    if case.path == "/rerank":
        yield from _rerank_faults(case, expected, actual)
    else:
        yield from _embedding_faults(case, expected, actual)


def _embedding_faults(case: Case, expected: Answer, actual: Answer) -> Iterator[str]:
    labels = [(item["id"], item["text"]) for item in actual["data"]]
    if labels != [(item["id"], item["text"]) for item in expected["data"]]:
        yield "ids or texts differ"
    for item, theirs in zip(actual["data"], expected["data"], strict=False):
        vectors = item["embeddings"]
        if tuple(vectors) != tuple(theirs["embeddings"]) or not {*KINDS} <= {*vectors}:
            yield f"text {item['id']} has {tuple(vectors)}"
        if item.get("tokens") != theirs.get("tokens"):
            yield f"text {item['id']} has other tokens"
        for kind in KINDS:
            if case.body[f"return_{kind}"] and vectors.get(kind) is None:
                yield f"text {item['id']} has no {kind}"


def _rerank_faults(case: Case, expected: Answer, actual: Answer) -> Iterator[str]:
    passages: Any = case.body["passages"]
    results = actual["results"]
    order = [(-result["score"], result["index"]) for result in results]
    if order != sorted(order):
        yield "not by falling score"
    if sorted(index for _, index in order) != list(range(len(passages))):
        yield "not every passage once"
    if any(result["passage"] != passages[result["index"]] for result in results):
        yield "a passage beside another's index"
    if {tuple(result) for result in results} != {tuple(one) for one in expected["results"]}:
        yield f"results have {set(results[0])}"


def _distances(case: Case, expected: Answer, actual: Answer) -> Iterator[tuple[str, float]]:
    if case.path == "/rerank":
        yield from _rerank_distances(expected, actual)
        return
    for theirs, ours in zip(expected["data"], actual["data"], strict=True):
        for kind, left in theirs["embeddings"].items():
            if left is not None:
                distance = _distance_of(kind, left, ours["embeddings"][kind], case.body)
                yield f"{kind} of text {ours['id']}", distance


def _distance_of(kind: str, expected: Any, actual: Any, body: Body) -> float:
    if kind == "sparse":
        return _sparse_distance(expected, actual)
    if kind in KINDS and body.get("output_dtype") in _WHOLE_NUMBERS:
        # What lies between two whole numbers may be rounded to either.
        return max(0.0, float(np.abs(np.subtract(expected, actual)).max()) - 1)
    return apart(np.atleast_1d(expected), np.atleast_1d(actual))


def _rerank_distances(expected: Answer, actual: Answer) -> Iterator[tuple[str, float]]:
    by_index = {result["index"]: result for result in actual["results"]}
    for theirs in expected["results"]:
        ours = by_index[theirs["index"]]
        parts = [list((result.get("parts") or {}).values()) for result in (theirs, ours)]
        left, right = (
            [result["score"], *of] for result, of in zip((theirs, ours), parts, strict=True)
        )
        for one, other in zip(left, right, strict=True):
            yield f"score of passage {theirs['index']}", apart([one], [other])


def apart(expected: Iterable[Any], actual: Iterable[Any]) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    left, right = (np.asarray(side, dtype=np.float32) for side in (expected, actual))
    if left.shape != right.shape:
        return float("inf")
    if not left.size:
        return 0.0
    return float(np.abs(left - right).max() / max(1.0, float(np.abs(left).max())))


def _sparse_distance(expected: Answer, actual: Answer) -> float:
    left, right = _weights(expected), _weights(actual)
    tokens = sorted(left.keys() | right.keys())
    return apart(*([side.get(token, 0.0) for token in tokens] for side in (left, right)))


def _weights(sparse: Answer) -> dict[int, float]:
    """Weights by token, from either of the two shapes."""
    if sparse.keys() == {"indices", "values"}:
        return dict(zip(sparse["indices"], sparse["values"], strict=True))
    return {int(token): weight for token, weight in sparse.items()}
