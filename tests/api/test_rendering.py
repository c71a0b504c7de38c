"""Vectors and scores as JSON."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api import rendering
from app.api.rendering import render_rerank, text_as_json
from app.engine.types import RerankResult
from app.observability.tracing import Timings


def test_scores_that_are_shown_as_equal_keep_the_order_of_the_request() -> None:
    scores = [0.25, 0.5, 0.5 + 1e-12, 0.75]
    result = RerankResult(scores, None, [], 0, Timings(0, 0, 0, 0))
    answer = orjson.loads(b"".join(render_rerank(list("abcd"), result, "model")))
    assert [one["index"] for one in answer["results"]] == [3, 1, 2, 0]
    assert [one["score"] for one in answer["results"]] == [0.75, 0.5, 0.5, 0.25]


@given(st.text('a"\\\n\x00é\U0001f600'))
def test_a_long_text_is_written_in_parts_that_make_the_same(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "_CHARACTERS_PER_PART", 3)
        assert orjson.dumps({"text": text_as_json(text)}) == orjson.dumps({"text": text})


def test_no_part_of_an_answer_writes_a_long_text_at_once(monkeypatch) -> None:
    written = []

    class Counted:
        Fragment = orjson.Fragment

        @staticmethod
        def dumps(value: object, **options: object) -> bytes:
            written.append(len(value) if isinstance(value, str) else 0)
            return orjson.dumps(value, **options)

    monkeypatch.setattr(rendering, "orjson", Counted)
    passage = "\n" * 1_000_000
    result = RerankResult([0.5], None, [], 0, Timings(0, 0, 0, 0))
    answer = orjson.loads(b"".join(render_rerank([passage], result, "model")))
    assert answer["results"][0]["passage"] == passage
    assert 0 < max(written) <= 65_536
