"""embedding-server's path: TEI's request, with usage and times in the answer."""

import re

from tests.api.dialects.conftest import native
from tests.support.checkpoints import corpus

TEXTS = corpus(5, seed=8)


def test_the_answer_has_the_native_vectors_usage_and_times(client) -> None:
    answer = client.post("/api/v1/embed", json={"inputs": TEXTS}).json()
    assert list(answer) == ["data", "usage", "timings"]
    assert [each["embedding"] for each in answer["data"]] == [
        each["dense"] for each in native(client, TEXTS)
    ]
    assert [each["index"] for each in answer["data"]] == list(range(5))
    counted = client.post("/embeddings/", json={"sentences": TEXTS}).json()["usage"]
    assert answer["usage"] == counted
    assert list(answer["timings"]) == ["tokenization", "queue", "inference"]
    for each in answer["timings"].values():
        assert re.fullmatch(r"[\d.]+(e[+-]\d+)?(µs|ms|s)", each)


def test_its_errors_are_teis(full) -> None:
    answer = full.post("/api/v1/embed", json={"inputs": [1, 2, 3]})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "Validation")
    too_long = full.post("/api/v1/embed", json={"inputs": "search " * 60_000})
    assert too_long.status_code == 422
