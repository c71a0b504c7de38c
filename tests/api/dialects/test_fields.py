"""Fields that several dialects share: what each value means, and which ones are refused."""

from itertools import product
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from smart_embedder.api.dialects.fields import (
    DTYPES,
    TASKS,
    AnyCase,
    Task,
    TextsOrObjects,
    TextsOrText,
    truncation_of,
    unless,
    value_of,
)
from smart_embedder.errors import InvalidRequestError


def test_a_task_is_for_queries_or_documents_and_names_its_prompts() -> None:
    assert TASKS["qa.query"] == Task("query", ("qa.query", "qa_query"))
    passage = ("code.passage", "code_document", "code_passage")
    assert TASKS["code.passage"] == Task("document", passage)
    for name, task in TASKS.items():
        side = (
            "query" if "query" in name else "document" if "pass" in name or "doc" in name else None
        )
        assert task.input_type == side, name
        assert task.prompts[:1] == (name,) or name in {"text", "query", "document", "passage"}
    assert DTYPES["base64"] == DTYPES["float"] == "float32"
    assert DTYPES["ubinary"] == "ubinary"


HOW = [None, True, False, "NONE", "START", "END"]


@pytest.mark.parametrize(
    ("how", "side", "most"), [*product(HOW, [None, "left", "right"], [None, 7])]
)
def test_truncation_and_its_side_agree_or_are_refused(how, side, most) -> None:
    said = {"START": "left", "END": "right"}.get(how)
    cuts = how not in {False, "NONE"}
    if (said and side and said != side) or (not cuts and side == "left"):
        with pytest.raises(InvalidRequestError):
            truncation_of(how, side, most)
        return
    options = truncation_of(how, side, most)
    assert (options.truncate, options.side) == (cuts, said or side or "right")
    assert options.max_tokens == most


class Body(BaseModel):
    a: Any = None
    b: Any = None
    c: Any = None


@given(*[st.sampled_from([None, 0, 1, False, ""])] * 3)
def test_of_several_names_for_one_thing_only_one_value_counts(a, b, c) -> None:
    said = [each for each in (a, b, c) if each is not None]
    body = Body(a=a, b=b, c=c)
    if any(each != said[0] for each in said):
        with pytest.raises(InvalidRequestError, match="the fields a, b and c mean the same"):
            value_of(body, "a", "b", "c")
    else:
        assert value_of(body, "a", "b", "c") == (said[0] if said else None)


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        (None, True), ([], True), ({}, True), ("", True), (False, True), ("False", True),
        ("fALSE", True), ([False, "false"], True), (0, True), ("none", True), ("None", True),
        (True, False), ("true", False), ([False, True], False), ({"a": False}, False),
        ("false" + " " * 40, False), (1, False), ([[]], False), ("f", False),
    ],
)  # fmt: skip
def test_a_field_that_is_not_read_may_say_what_changes_nothing(value, taken) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Any, unless(False, "none")])
    if taken:
        assert adapter.validate_python(value) == value
    else:
        with pytest.raises(ValidationError, match="nothing but false is done here"):
            adapter.validate_python(value)


def test_without_a_harmless_value_only_nothing_is_taken() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Any, unless()])
    assert adapter.validate_python([]) == []
    for value in (False, 0, "none", [None]):
        with pytest.raises(ValidationError, match="this is not done here"):
            adapter.validate_python(value)


def test_a_word_is_folded_unless_it_is_long_for_one() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Any, AnyCase(str.upper)])
    assert adapter.validate_python("end") == "END"
    assert adapter.validate_python("a" * 32) == "A" * 32
    assert adapter.validate_python("a" * 33) == "a" * 33
    assert adapter.validate_python(["end"]) == ["end"]


BOTH: list[TypeAdapter[Any]] = [TypeAdapter(TextsOrText), TypeAdapter(TextsOrObjects)]


@pytest.mark.parametrize("adapter", BOTH)
@pytest.mark.parametrize(
    ("value", "texts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ("", [""]), ([], [])]
)
def test_a_text_is_a_list_of_one(adapter, value, texts) -> None:
    assert adapter.validate_python(value) == texts


@pytest.mark.parametrize("adapter", BOTH)
@pytest.mark.parametrize("value", [[1, 2], [[1], [2]], [[]], [[True]]])
def test_token_ids_are_told_apart_from_other_mistakes(adapter, value) -> None:
    with pytest.raises(ValidationError, match="token ids"):
        adapter.validate_python(value)


@pytest.mark.parametrize("adapter", BOTH)
@pytest.mark.parametrize("value", [[True], [None], [["a"]], [{"image": "x"}], {"image": "x"}, 1])
def test_what_is_neither_text_nor_token_is_no_text(adapter, value) -> None:
    with pytest.raises(ValidationError) as error:
        adapter.validate_python(value)
    assert "token ids" not in str(error.value)


def test_an_object_is_its_text_where_it_holds_nothing_else() -> None:
    _, objects = BOTH
    assert objects.validate_python({"text": "a"}) == ["a"]
    assert objects.validate_python([{"text": "a", "id": 7}, "b"]) == ["a", "b"]
    for value in ({"text": "a", "image": "x"}, [{"id": 7}]):
        with pytest.raises(ValidationError):
            objects.validate_python(value)
    with pytest.raises(ValidationError):
        BOTH[0].validate_python({"text": "a"})
