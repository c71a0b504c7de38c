"""What the several names of OpenAI's fields and of those beside them mean together."""

from dataclasses import replace
from typing import Any

import pytest

from smart_embedder.api.dialects.fields import TASKS, Task
from smart_embedder.api.dialects.openai import OpenAIEmbeddingRequest, VectorForm
from smart_embedder.engine.records import TruncationOptions
from smart_embedder.errors import InvalidRequestError


def body(**fields: Any) -> OpenAIEmbeddingRequest:
    return OpenAIEmbeddingRequest.model_validate({"input": "a"} | fields)


SEVERAL = ["int8", "float"]
FLOATS, INT8 = VectorForm("float32", as_base64=False), VectorForm("int8", as_base64=False)
BASE64, BOTH = replace(FLOATS, as_base64=True), replace(FLOATS, types=("int8", "float"))
QUERY = Task("query", ("retrieval.query", "Retrieval-query", "search_query"))
CLASSIFIED = Task("document", ("classification", "Classification"))
RIGHT, LEFT, UNCUT = TruncationOptions(), TruncationOptions(side="left"), TruncationOptions(False)


@pytest.mark.parametrize(
    ("read", "fields", "said"),
    [
        ("form", {}, FLOATS),
        ("form", {"encoding_format": None}, FLOATS),
        ("form", {"encoding_format": "float"}, FLOATS),
        ("form", {"encoding_format": "base64"}, BASE64),
        ("form", {"encoding_format": ["base64"]}, BASE64),
        ("form", {"embedding_type": "base64"}, BASE64),
        ("form", {"embedding_type": ["base64"]}, BASE64),
        ("form", {"encoding_format": "int8"}, INT8),
        ("form", {"encoding_format": ["int8"], "output_dtype": "int8"}, INT8),
        # Clients send float or base64 by default, beside the type that they want.
        ("form", {"encoding_format": "float", "output_dtype": "int8"}, INT8),
        (
            "form",
            {"encoding_format": "base64", "output_dtype": "int8"},
            replace(INT8, as_base64=True),
        ),
        ("form", {"embedding_type": "int8", "output_dtype": "int8"}, INT8),
        ("form", {"embedding_type": [*SEVERAL, "int8"]}, BOTH),
        ("form", {"encoding_format": [*SEVERAL]}, BOTH),
        ("form", {"embedding_type": SEVERAL, "encoding_format": "float"}, BOTH),
        (
            "form",
            {"embedding_type": SEVERAL, "encoding_format": "base64"},
            replace(BOTH, as_base64=True),
        ),
        ("known_task", {}, Task()),
        ("known_task", {"task": "text-matching"}, TASKS["text-matching"]),
        ("known_task", {"task_type": "search_query"}, TASKS["search_query"]),
        ("known_task", {"input_type": "document", "task": "classification"}, CLASSIFIED),
        (
            "known_task",
            {"input_type": "query", "task_type": "search_query", "task": "retrieval.query"},
            QUERY,
        ),
        ("truncation_options", {}, RIGHT),
        ("truncation_options", {"truncate": "none"}, UNCUT),
        ("truncation_options", {"truncation": False}, UNCUT),
        ("truncation_options", {"truncation_strategy": "none"}, UNCUT),
        ("truncation_options", {"truncation_strategy": "start"}, LEFT),
        ("truncation_options", {"truncation_side": "left"}, LEFT),
    ],
)
def test_the_names_of_one_option_say_one_thing_together(read: str, fields, said) -> None:
    assert getattr(body(**fields), read) == said


DIFFER = "output_dtype differ"


@pytest.mark.parametrize(
    ("read", "fields", "said"),
    [
        ("form", {"encoding_format": "float", "embedding_type": "base64"}, DIFFER),
        ("form", {"encoding_format": "base64", "embedding_type": "float"}, DIFFER),
        ("form", {"encoding_format": "int8", "embedding_type": "float"}, DIFFER),
        ("form", {"encoding_format": "int8", "embedding_type": "uint8"}, DIFFER),
        ("form", {"encoding_format": "int8", "output_dtype": "float"}, DIFFER),
        ("form", {"embedding_type": "int8", "output_dtype": "binary"}, DIFFER),
        ("form", {"embedding_type": SEVERAL, "output_dtype": "int8"}, DIFFER),
        ("form", {"embedding_type": SEVERAL, "encoding_format": "uint8"}, DIFFER),
        ("form", {"embedding_type": SEVERAL, "encoding_format": SEVERAL}, DIFFER),
        ("form", {"embedding_type": SEVERAL, "return_colbert": True}, "return_colbert and embed"),
        ("known_task", {"task": "sing"}, "the field task is unknown: send text, query, document"),
        ("known_task", {"input_type": "query", "task_type": "sing"}, "task_type is unknown"),
        ("known_task", {"input_type": "query", "task": "passage"}, "task and task_type differ"),
        ("truncation_options", {"truncate": "END", "truncation": False}, "the same and differ"),
    ],
)
def test_names_that_say_different_things_are_refused(read: str, fields, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        getattr(body(**fields), read)
