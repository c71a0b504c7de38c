"""What an error says: the field, what was sent, what is allowed; and never the caller's text."""

# ruff: noqa: E501 - a case with what is said of it is one line

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from smart_embedder.api.body import parse_json, validate
from smart_embedder.api.dialects.openai import OpenAIEmbeddingRequest
from smart_embedder.api.schemas import EmbeddingRequest, RequestModel, RerankBody
from smart_embedder.errors import InvalidRequestError

LIST = '{"sentences":["What is hybrid search?"]}'
PAIR = '"passages":["A recipe for bread.","It joins two rankings."]}'


def problem(model: type[RequestModel], body: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate(parse_json(body, model), model)
    return caught.value


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"sentences": "one"}, f"the field sentences is a string of 3 characters: send a list of strings, as in {LIST}"),
        ({"sentences": None}, "the field sentences is null: send a list of strings"),
        ({"sentences": {"a": 1}}, "the field sentences is an object with 1 fields: send a list of strings"),
        ({"sentences": ["a", 7]}, "the field sentences[1] is a number: send a string, as in"),
        ({"sentences": ["a", ["b"]]}, "the field sentences[1] is a list of 1 items: send a string"),
        ({}, f"the field sentences is missing: send it, as in {LIST}"),
        ([], f"the body is a list of 0 items: send an object such as {LIST}"),
        ({"texts": ["a"]}, "the field sentences is missing, and texts is none: call it sentences"),
        ({"input": "a"}, "the field sentences is missing, and input is none: call it sentences"),
        ({"sentance": ["a"]}, "the field sentences is missing, and sentance is none: call it sentences"),
        ({"sentences": ["a"], "dense": True}, "there is no field dense here: did you mean return_dense? There are sentences, return_dense"),
        ({"sentences": ["a"], "return_colbret": True}, "there is no field return_colbret here: did you mean return_colbert?"),
        ({"sentences": ["a"], "zzz": 1}, "there is no field zzz here: there are sentences,"),
        ({"sentences": ["a"], "return_dense": "yes"}, "the field return_dense is a string of 3 characters: send true or false"),
        ({"sentences": ["a"], "return_dense": 1}, "the field return_dense is a number: send true or false"),
    ],
)  # fmt: skip
def test_an_embedding_request_is_told_what_to_send(body, said: str) -> None:
    assert str(problem(EmbeddingRequest, orjson.dumps(body))).startswith(said)


@pytest.mark.parametrize("unknown", [9, 10, 11, 5000])
@pytest.mark.parametrize("first", [True, False])
def test_of_countless_unknown_names_ten_are_told_and_no_field_is_lost(unknown, first) -> None:
    """An error for each would take longer than the work."""
    names = {f"unknown {i}": i for i in range(unknown)}
    known = {"sentences": ["a"], "return_dense": 1}
    sent = known | names if first else names | known
    with pytest.raises(ValidationError) as caught:
        EmbeddingRequest.model_validate(sent)
    told = [each["loc"] for each in caught.value.errors()]
    assert told == [("return_dense",), *((f"unknown {i}",) for i in range(min(unknown, 10)))]


def test_what_an_api_ignores_is_ignored_however_much_it_is() -> None:
    names = {f"unknown {i}": i for i in range(5000)}
    body = OpenAIEmbeddingRequest.model_validate(names | {"input": "a", "dimensions": 7})
    assert (body.input, body.dimensions) == (["a"], 7)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("field", ["input_type", "sentences", "prompt", "unknown"])
def test_a_long_string_is_refused_early_where_no_text_belongs(field: str, as_list: bool) -> None:
    for size in (16_384, 16_385):
        sent = ["", "a" * size, ""] if as_list else "a" * size
        error = None
        try:  # Behind a text, which may be as long.
            EmbeddingRequest.model_validate({"sentences": ["a" * 16_385]} | {field: sent})
        except ValidationError:
            pass
        except InvalidRequestError as found:
            error = found
        is_early = field == "input_type" and size > 16_384
        assert (error is not None) is is_early
        if error is not None:
            assert "input_type holds a string of 16385 characters, and no text" in str(error)
            assert [each["pointer"] for each in error.problems] == ["/input_type"]


def test_a_pointer_is_written_as_json_pointers_are() -> None:
    (found,) = problem(EmbeddingRequest, b'{"sentences": ["a"], "a/b~c": 1}').problems
    assert found["pointer"] == "/a~1b~0c"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"query": "a", "documents": ["b"]}, "the field passages is missing, and documents is none: call it passages, as in"),
        ({"query": "a", "texts": ["b"]}, "the field passages is missing, and texts is none: call it passages"),
        ({"q": "a", "passages": ["b"]}, "the field query is missing, and q is none: call it query"),
        ({"query": "a", "passages": "b"}, "the field passages is a string of 1 characters: send a list of strings"),
        ({"query": ["a"], "passages": ["b"]}, "the field query is a list of 1 items: send a string"),
        ({"query": "a", "passages": ["b"], "weights": {"dense": -1}}, "the field weights.dense is out of range: send at least 0"),
        ({"query": "a", "passages": ["b"], "weights": {"dense": "1"}}, "the field weights.dense is a string of 1 characters: send a number"),
        ({"query": "a", "passages": ["b"], "weights": {"sparce": 1}}, "there is no field sparce here: did you mean sparse? There are dense, sparse, colbert"),
        ({"query": "a", "weights": {"x": 1, "y": 1, "z": 1}, "pasages": ["b"]}, "the field passages is missing, and pasages is none: call it passages"),
        ({"query": "a", "passages": ["b"], "weights": [1, 1, 1]}, 'the field weights is a list of 3 items: send an object such as {"dense":1'),
        ({"query": "a", "passages": ["b"], "normalise": True}, "there is no field normalise here: did you mean normalize?"),
    ],
)  # fmt: skip
def test_a_rerank_request_is_told_what_to_send(body, said: str) -> None:
    assert str(problem(RerankBody, orjson.dumps(body))).startswith(said)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", f"the body is empty: send {LIST}"),
        (b"no json", "the body of 7 bytes is no JSON (expected ident at line 1 column 2)"),
        (b'{"sentences": ["a"', "the body of 18 bytes is no JSON (EOF while parsing a list"),
        (b'{"sentences": ["\\ud800"]}', "the body of 25 bytes is no JSON (unexpected end of hex"),
    ],
)
def test_what_is_no_json_is_told_where_it_ends_to_be(body: bytes, said: str) -> None:
    assert str(problem(EmbeddingRequest, body)).startswith(said)


SECRET = st.text("zZ\n\x1b\u202e", min_size=70, max_size=90).map(lambda text: f"{text}hush")
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | SECRET,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SECRET, inner, max_size=3),
)
FIELDS = sorted({*EmbeddingRequest.model_fields, *RerankBody.model_fields, "texts", "dense"})


@given(
    st.sampled_from([EmbeddingRequest, RerankBody]),
    st.dictionaries(st.sampled_from(FIELDS) | SECRET, JSON, max_size=6) | JSON,
)
def test_whatever_was_sent_no_text_of_it_is_quoted(model: type[RequestModel], body) -> None:
    """The name of an unknown field is cut before the secret; nothing can end a log's line."""
    sent = orjson.dumps(body)
    try:
        validate(parse_json(sent, model), model)
    except InvalidRequestError as error:
        answer = error
    else:
        return
    said = [str(answer), *(each["message"] for each in answer.problems)]
    assert all(text.isprintable() and "hush" not in text for text in said)
    assert len(answer.problems) <= 10
