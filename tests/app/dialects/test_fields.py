"""Fields that several dialects share: what each value means, and which ones are refused."""

from itertools import product
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from app.dialects.fields import (
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

# What Azure, Cohere, Jina, Nomic, NVIDIA and Voyage document for `input_type`, `task`, `task_type`.
QUERIES = ["query", "search_query", "retrieval.query", "code.query", "nl2code.query", "qa.query"]
QUERIES += ["code2code.query", "code2nl.query", "code2completion.query"]
DOCUMENTS = ["document", "search_document", *(each.replace("query", "passage") for each in QUERIES)]
DOCUMENTS.remove("search_passage")
OTHERS = ["text", "text-matching", "classification", "clustering", "separation"]


def test_a_documented_task_is_for_queries_or_documents_and_names_its_prompts() -> None:
    for names, side in ((QUERIES, "query"), (DOCUMENTS, "document"), (OTHERS, None)):
        for name in names:
            assert TASKS[name].input_type == side, name
            prompts = TASKS[name].prompts[:1]
            assert prompts == (name,) or name in {"text", "query", "document", "passage"}
    assert TASKS["qa.query"] == Task("query", ("qa.query", "qa_query"))
    passage = ("code.passage", "code_document", "code_passage")
    assert TASKS["code.passage"] == Task("document", passage)
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


@pytest.mark.parametrize("said", [*product([None, 0, 1, ""], repeat=3)])
def test_of_several_names_for_one_thing_only_one_value_counts(said) -> None:
    body, told = Body(**dict(zip("abc", said, strict=True))), {*said} - {None}
    if len(told) > 1:
        with pytest.raises(InvalidRequestError, match="the fields a, b and c mean the same"):
            value_of(body, *"abc")
    else:
        assert value_of(body, *"abc") == (told.pop() if told else None)


@pytest.mark.parametrize(
    ("harmless", "value", "refused"),
    [
        *(
            ((False, "none"), value, None)
            for value in (None, [], {}, "", False, "False", "fALSE", [False, "false"], 0, "None")
        ),
        *(
            ((False, "none"), value, "nothing but false is done here")
            for value in (True, "true", [False, True], {"a": 0}, f"false{' ' * 40}", 1, [[]], "f")
        ),
        ((), [], None),
        *(((), value, "this is not done here") for value in (False, 0, "none", [None])),
    ],
)
def test_a_field_that_is_not_read_may_say_what_changes_nothing(harmless, value, refused) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Any, unless(*harmless)])
    if refused is None:
        assert adapter.validate_python(value) == value
    else:
        with pytest.raises(ValidationError, match=refused):
            adapter.validate_python(value)


def test_a_word_is_folded_unless_it_is_long_for_one() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Any, AnyCase(str.upper)])
    assert adapter.validate_python("end") == "END"
    assert adapter.validate_python("a" * 32) == "A" * 32
    assert adapter.validate_python("a" * 33) == "a" * 33
    assert adapter.validate_python(["end"]) == ["end"]


@pytest.mark.parametrize("kind", [TextsOrText, TextsOrObjects])
@pytest.mark.parametrize(
    ("value", "texts", "said"),
    [
        ("a", ["a"], None), (["a", "b"], ["a", "b"], None), ("", [""], None), ([], [], None),
        *((ids, None, True) for ids in ([1, 2], [[1], [2]], [[]], [[True]])),
        *((value, None, False) for value in ([True], [None], [["a"]], [{"image": "x"}], 1)),
        ({"image": "x"}, None, False),
    ],
)  # fmt: skip
def test_a_text_is_a_list_of_one_and_token_ids_are_told_from_other_mistakes(
    kind, value, texts, said
) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    if texts is not None:
        assert adapter.validate_python(value) == texts
        return
    with pytest.raises(ValidationError) as error:
        adapter.validate_python(value)
    assert ("token ids" in str(error.value)) is said


def test_an_object_is_its_text_where_it_holds_nothing_else() -> None:
    objects: TypeAdapter[Any] = TypeAdapter(TextsOrObjects)
    assert objects.validate_python({"text": "a"}) == ["a"]
    assert objects.validate_python([{"text": "a", "id": 7}, "b"]) == ["a", "b"]
    for value in ({"text": "a", "image": "x"}, [{"id": 7}]):
        with pytest.raises(ValidationError):
            objects.validate_python(value)
    with pytest.raises(ValidationError):
        TypeAdapter(TextsOrText).validate_python({"text": "a"})
