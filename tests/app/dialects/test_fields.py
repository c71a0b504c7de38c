"""Field types that several dialects share: the meaning of values, and refused values."""

from itertools import product
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from app.dialects.fields import (
    DTYPES,
    TASKS,
    Task,
    TextsOrObjects,
    TextsOrText,
    allow_only,
    build_truncation,
    fold_case,
    merge_aliases,
)
from smart_embedder.errors import InvalidRequestError
from smart_embedder.requests import TruncationOptions

# Values that Azure, Cohere, Jina, Nomic, NVIDIA and Voyage document for the fields of tasks.
QUERIES = ["query", "search_query", "retrieval.query", "code.query", "nl2code.query", "qa.query"]
QUERIES += ["code2code.query", "code2nl.query", "code2completion.query"]
DOCUMENTS = ["document", "search_document"]
DOCUMENTS += [query.replace("query", "passage") for query in QUERIES]
DOCUMENTS.remove("search_passage")
OTHERS = ["text", "text-matching", "classification", "clustering", "separation"]


def test_each_documented_task_has_an_input_type_and_prompts() -> None:
    for names, input_type in ((QUERIES, "query"), (DOCUMENTS, "document"), (OTHERS, None)):
        for name in names:
            assert TASKS[name].input_type == input_type, name
            prompts = TASKS[name].prompts[:1]
            assert prompts == (name,) or name in {"text", "query", "document", "passage"}
    assert TASKS["qa.query"] == Task("query", ("qa.query", "qa_query"))
    passage = ("code.passage", "code_document", "code_passage")
    assert TASKS["code.passage"] == Task("document", passage)
    assert DTYPES["base64"] == DTYPES["float"] == "float32"
    assert DTYPES["ubinary"] == "ubinary"


TRUNCATE = [None, True, False, "NONE", "START", "END"]


@pytest.mark.parametrize(("truncate", "side"), [*product(TRUNCATE, [None, "left", "right"])])
def test_truncation_and_truncation_side_agree_or_are_refused(truncate, side) -> None:
    named_side = {"START": "left", "END": "right"}.get(truncate)
    cuts = truncate not in {False, "NONE"}
    if (named_side and side and named_side != side) or (not cuts and side == "left"):
        with pytest.raises(InvalidRequestError):
            build_truncation(truncate, side, None)
        return
    expected = TruncationOptions(cuts, named_side or side or "right", 7)
    assert build_truncation(truncate, side, 7) == expected


class Body(BaseModel):
    a: Any = None
    b: Any = None
    c: Any = None


def test_aliases_with_different_values_are_refused() -> None:
    for values in product([None, 0, 1, ""], repeat=3):
        body, set_values = Body(**dict(zip("abc", values, strict=True))), {*values} - {None}
        if len(set_values) > 1:
            with pytest.raises(InvalidRequestError, match="the fields a, b and c mean the same"):
                merge_aliases(body, *"abc")
        else:
            assert merge_aliases(body, *"abc") == (set_values.pop() if set_values else None)


@pytest.mark.parametrize(
    ("harmless", "value", "refused"),
    [
        *(
            ((False, "none"), value, None)
            for value in (None, [], {}, "", False, "fALSE", [False, "false"], 0, "None")
        ),
        *(
            ((False, "none"), value, "nothing but false is supported here")
            for value in (True, "true", [False, True], {"a": 0}, f"false{' ' * 40}", 1, [[]], "f")
        ),
        ((), [], None),
        *(((), value, "this is not supported here") for value in (False, 0, "none", [None])),
    ],
)
def test_an_unsupported_field_may_have_a_harmless_value(harmless, value, refused) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Any, allow_only(*harmless)])
    if refused is None:
        assert adapter.validate_python(value) == value
    else:
        with pytest.raises(ValidationError, match=refused):
            adapter.validate_python(value)


def test_the_case_of_a_short_string_is_folded() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[Any, fold_case(str.upper)])
    assert adapter.validate_python("end") == "END"
    assert adapter.validate_python("a" * 32) == "A" * 32
    assert adapter.validate_python("a" * 33) == "a" * 33
    assert adapter.validate_python(["end"]) == ["end"]


@pytest.mark.parametrize("type_", [TextsOrText, TextsOrObjects])
@pytest.mark.parametrize(
    ("value", "texts", "names_token_ids"),
    [
        ("a", ["a"], None), (["a", "b"], ["a", "b"], None), ("", [""], None), ([], [], None),
        *((ids, None, True) for ids in ([1, 2], [[1], [2]], [[]], [[True]])),
        *((value, None, False) for value in ([True], [None], [["a"]], [{"picture": "x"}], 1)),
        ({"image": "x"}, None, False),
    ],
)  # fmt: skip
def test_a_single_text_becomes_a_list_and_token_ids_get_their_own_error(
    type_, value, texts, names_token_ids
) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(type_)
    if texts is not None:
        assert adapter.validate_python(value) == texts
        return
    with pytest.raises(ValidationError) as error:
        adapter.validate_python(value)
    assert ("token ids" in str(error.value)) is names_token_ids


def test_an_object_with_only_a_text_is_read_as_that_text() -> None:
    objects: TypeAdapter[Any] = TypeAdapter(TextsOrObjects)
    assert objects.validate_python({"text": "a"}) == ["a"]
    assert objects.validate_python([{"text": "a", "id": 7}, "b"]) == ["a", "b"]
    for value in ({"text": "a", "image": "x"}, [{"id": 7}]):
        with pytest.raises(ValidationError):
            objects.validate_python(value)
    with pytest.raises(ValidationError):
        TypeAdapter(TextsOrText).validate_python({"text": "a"})
