"""What the several names of OpenAI's fields and of those beside them mean together."""

from typing import Any

import pytest

from smart_embedder.api.dialects.fields import TASKS, Task
from smart_embedder.api.dialects.openai import OpenAIEmbeddingRequest, VectorForm
from smart_embedder.errors import InvalidRequestError


def body(**fields: Any) -> OpenAIEmbeddingRequest:
    return OpenAIEmbeddingRequest.model_validate({"input": "a"} | fields)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, VectorForm("float32", as_base64=False)),
        ({"encoding_format": "float"}, VectorForm("float32", as_base64=False)),
        ({"encoding_format": "base64"}, VectorForm("float32", as_base64=True)),
        ({"encoding_format": ["base64"]}, VectorForm("float32", as_base64=True)),
        ({"embedding_type": "base64"}, VectorForm("float32", as_base64=True)),
        ({"encoding_format": "int8"}, VectorForm("int8", as_base64=False)),
        ({"output_dtype": "ubinary"}, VectorForm("ubinary", as_base64=False)),
        ({"embedding_type": "uint8"}, VectorForm("uint8", as_base64=False)),
        # Clients send float or base64 by default, beside the type that they want.
        ({"encoding_format": "float", "output_dtype": "int8"}, VectorForm("int8", as_base64=False)),
        ({"encoding_format": "base64", "output_dtype": "int8"}, VectorForm("int8", as_base64=True)),
        ({"embedding_type": "int8", "output_dtype": "int8"}, VectorForm("int8", as_base64=False)),
        (
            {"embedding_type": ["int8", "float", "int8"]},
            VectorForm("float32", as_base64=False, types=("int8", "float")),
        ),
        (
            {"encoding_format": ["ubinary", "base64"]},
            VectorForm("float32", as_base64=False, types=("ubinary", "base64")),
        ),
        (
            {"embedding_type": ["int8", "float"], "encoding_format": "base64"},
            VectorForm("float32", as_base64=True, types=("int8", "float")),
        ),
        (
            {"embedding_type": ["int8", "float"], "encoding_format": "float"},
            VectorForm("float32", as_base64=False, types=("int8", "float")),
        ),
    ],
)
def test_the_names_of_an_encoding_say_one_thing_together(fields, form: VectorForm) -> None:
    assert body(**fields).form == form


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"encoding_format": "float", "embedding_type": "base64"}, "output_dtype differ"),
        ({"encoding_format": "base64", "embedding_type": "float"}, "output_dtype differ"),
        ({"encoding_format": "int8", "embedding_type": "uint8"}, "output_dtype differ"),
        ({"encoding_format": "int8", "output_dtype": "float"}, "output_dtype differ"),
        ({"embedding_type": "int8", "output_dtype": "binary"}, "output_dtype differ"),
        ({"embedding_type": ["int8", "float"], "output_dtype": "int8"}, "output_dtype differ"),
        (
            {"embedding_type": ["int8", "float"], "encoding_format": "uint8"},
            "output_dtype differ",
        ),
        (
            {"embedding_type": ["int8", "float"], "encoding_format": ["int8", "float"]},
            "output_dtype differ",
        ),
        (
            {"embedding_type": ["int8", "float"], "return_colbert": True},
            "return_colbert and embedding_type exclude each other",
        ),
    ],
)
def test_names_of_an_encoding_that_differ_are_refused(fields, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        _ = body(**fields).form


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({}, Task()),
        ({"task": "text-matching"}, TASKS["text-matching"]),
        ({"task_type": "search_query"}, TASKS["search_query"]),
        (
            {"input_type": "document", "task": "classification"},
            Task("document", ("classification", "Classification")),
        ),
        (
            {"input_type": "query", "task_type": "search_query", "task": "retrieval.query"},
            Task("query", ("retrieval.query", "Retrieval-query", "search_query")),
        ),
    ],
)
def test_a_task_has_three_names(fields, task: Task) -> None:
    assert body(**fields).known_task == task


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"task": "sing"}, "the field task is unknown: send text, query, document"),
        ({"input_type": "query", "task_type": "sing"}, "the field task_type is unknown"),
        ({"input_type": "query", "task": "passage"}, "input_type, task and task_type differ"),
    ],
)
def test_an_unknown_task_and_two_that_differ_are_refused(fields, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        _ = body(**fields).known_task


def test_how_a_text_is_cut_has_three_names() -> None:
    for name in ("truncate", "truncation", "truncation_strategy"):
        assert body().truncation_options.truncate
        value = False if name == "truncation" else "none"
        assert not body(**{name: value}).truncation_options.truncate
    assert body(truncation_strategy="start").truncation_options.side == "left"
    assert body(truncation_side="left").truncation_options.side == "left"
    with pytest.raises(InvalidRequestError, match="mean the same and differ"):
        _ = body(truncate="END", truncation=False).truncation_options
