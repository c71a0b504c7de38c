"""What the several names of OpenAI's fields and of those beside them mean together."""

from typing import Any

import pytest

from smart_embedder.api.dialects.fields import TASKS, Task
from smart_embedder.api.dialects.openai import OpenAIEmbeddingRequest, VectorForm
from smart_embedder.errors import InvalidRequestError


def body(**fields: Any) -> OpenAIEmbeddingRequest:
    return OpenAIEmbeddingRequest.model_validate({"input": "a"} | fields)


SEVERAL = ["int8", "float"]


@pytest.mark.parametrize(
    ("fields", "dtype", "as_base64", "types"),
    [
        ({}, "float32", False, ()),
        ({"encoding_format": None}, "float32", False, ()),
        ({"encoding_format": "float"}, "float32", False, ()),
        ({"encoding_format": "base64"}, "float32", True, ()),
        ({"encoding_format": ["base64"]}, "float32", True, ()),
        ({"embedding_type": "base64"}, "float32", True, ()),
        ({"embedding_type": ["base64"]}, "float32", True, ()),
        ({"encoding_format": "int8"}, "int8", False, ()),
        ({"encoding_format": ["int8"], "output_dtype": "int8"}, "int8", False, ()),
        ({"output_dtype": "ubinary"}, "ubinary", False, ()),
        ({"embedding_type": "uint8"}, "uint8", False, ()),
        # Clients send float or base64 by default, beside the type that they want.
        ({"encoding_format": "float", "output_dtype": "int8"}, "int8", False, ()),
        ({"encoding_format": "base64", "output_dtype": "int8"}, "int8", True, ()),
        ({"embedding_type": "int8", "output_dtype": "int8"}, "int8", False, ()),
        ({"embedding_type": [*SEVERAL, "int8"]}, "float32", False, ("int8", "float")),
        ({"encoding_format": ["ubinary", "base64"]}, "float32", False, ("ubinary", "base64")),
        ({"embedding_type": SEVERAL, "encoding_format": "base64"}, "float32", True, (*SEVERAL,)),
        ({"embedding_type": SEVERAL, "encoding_format": "float"}, "float32", False, (*SEVERAL,)),
    ],
)
def test_the_names_of_an_encoding_say_one_thing_together(fields, dtype, as_base64, types) -> None:
    assert body(**fields).form == VectorForm(dtype, as_base64, types)


DIFFER = "output_dtype differ"


@pytest.mark.parametrize(
    ("fields", "read", "said"),
    [
        ({"encoding_format": "float", "embedding_type": "base64"}, "form", DIFFER),
        ({"encoding_format": "base64", "embedding_type": "float"}, "form", DIFFER),
        ({"encoding_format": "int8", "embedding_type": "float"}, "form", DIFFER),
        ({"encoding_format": "int8", "embedding_type": "uint8"}, "form", DIFFER),
        ({"encoding_format": "int8", "output_dtype": "float"}, "form", DIFFER),
        ({"embedding_type": "int8", "output_dtype": "binary"}, "form", DIFFER),
        ({"embedding_type": SEVERAL, "output_dtype": "int8"}, "form", DIFFER),
        ({"embedding_type": SEVERAL, "encoding_format": "uint8"}, "form", DIFFER),
        ({"embedding_type": SEVERAL, "encoding_format": SEVERAL}, "form", DIFFER),
        ({"embedding_type": SEVERAL, "return_colbert": True}, "form", "return_colbert and embed"),
        ({"task": "sing"}, "known_task", "the field task is unknown: send text, query, document"),
        ({"input_type": "query", "task_type": "sing"}, "known_task", "task_type is unknown"),
        ({"input_type": "query", "task": "passage"}, "known_task", "task and task_type differ"),
        ({"truncate": "END", "truncation": False}, "truncation_options", "the same and differ"),
    ],
)
def test_names_that_say_different_things_are_refused(fields, read: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        getattr(body(**fields), read)


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
    ("fields", "truncate", "side"),
    [
        ({}, True, "right"),
        ({"truncate": "none"}, False, "right"),
        ({"truncation": False}, False, "right"),
        ({"truncation_strategy": "none"}, False, "right"),
        ({"truncation_strategy": "start"}, True, "left"),
        ({"truncation_side": "left"}, True, "left"),
    ],
)
def test_how_a_text_is_cut_has_three_names(fields, truncate: bool, side: str) -> None:
    options = body(**fields).truncation_options
    assert (options.truncate, options.side) == (truncate, side)
