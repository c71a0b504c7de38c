"""From a request's fields to kinds of vectors, number types and the names of their models."""

from dataclasses import dataclass

import pytest

from smart_embedder.api.catalogue import Role, ServedModel
from smart_embedder.api.formats.vectors import ModelNames
from smart_embedder.api.schemas import EmbeddingFields
from smart_embedder.api.work import as_asked_for, check_numbers, model_names, vector_options
from smart_embedder.engine.records import Outputs
from smart_embedder.errors import InvalidRequestError
from smart_embedder.settings import Settings

SETTINGS = Settings(api_token=None, embedding_model="own/bge", dense_embedding_model="own/qwen")


def fields(**values: object) -> EmbeddingFields:
    return EmbeddingFields.model_validate(values)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (None, ("own/qwen", "own/bge", "own/bge")),
        (ServedModel(Role.DENSE, ("dense",)), ("own/qwen", "own/bge", "own/bge")),
        (ServedModel(Role.RERANKER, ("reranker",)), ("own/qwen", "own/bge", "own/bge")),
        (ServedModel(Role.EMBEDDER, ("bge", "other")), ("bge",) * 3),
        (ServedModel(Role.EMBEDDER, ("more",), further=True), ("more",) * 3),
        (ServedModel(Role.DENSE, ("more",), further=True), ("more",) * 3),
    ],
)
def test_a_kind_is_told_with_the_model_that_makes_it(model, names) -> None:
    assert model_names(SETTINGS, model) == ModelNames(*names)


@dataclass
class Models:
    dense: str | None = "qwen"


@pytest.mark.parametrize(
    ("model", "alone"),
    [
        (None, False),
        (ServedModel(Role.DENSE, ("dense",)), False),
        (ServedModel(Role.EMBEDDER, ("more",), further=True), False),
        (ServedModel(Role.EMBEDDER, ("bge",)), True),
    ],
)
def test_the_default_embedder_works_alone_where_it_is_named(model, alone) -> None:
    models = Models()
    assert as_asked_for(models, model) == Models(None if alone else "qwen")
    assert models == Models()
    assert as_asked_for(None, model) is None


@pytest.mark.parametrize(
    ("accept", "asked", "refused"),
    [
        ("json", {}, None),
        ("json", {"output_dtype": "int8"}, None),
        ("json", {"output_dtype": "float16"}, "JSON has no numbers for"),
        ("json", {"output_dtype": "bfloat16"}, "ask for arrow, msgpack in Accept"),
        ("json", {"output_dtype": "float16", "encoding": "base64"}, None),
        ("json", {"encoding": "base64"}, None),
        ("arrow", {"output_dtype": "float16"}, None),
        ("arrow", {"encoding": "base64"}, "the option encoding is for JSON"),
    ],
)
def test_a_format_holds_the_numbers_or_says_which_one_does(accept, asked, refused) -> None:
    if refused is None:
        check_numbers(fields(**asked), accept, ["arrow", "msgpack"])
    else:
        with pytest.raises(InvalidRequestError, match=refused):
            check_numbers(fields(**asked), accept, ["arrow", "msgpack"])


def test_before_there_are_models_the_kinds_are_those_of_the_request() -> None:
    options = vector_options(fields(return_sparse=False, output_dtype="int8"), None)
    assert options.outputs == Outputs(dense=True, colbert=True)
    assert (options.dtype, options.pool_factor, options.muvera) == ("int8", None, None)
    nothing = dict.fromkeys(("return_dense", "return_sparse", "return_colbert"), False)
    with pytest.raises(InvalidRequestError, match="nothing is asked for"):
        vector_options(fields(**nothing), None)
    options = vector_options(fields(**nothing, muvera="query"), None)
    assert (options.outputs, options.muvera) == (Outputs(), "query")


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"truncate": False, "truncation_side": "left"}, "truncation_side"),
        ({"colbert_pool_factor": 2, "input_type": "query"}, "these are queries"),
        ({"colbert_pool_factor": 2, "return_tokens": True}, "exclude each other"),
        ({"colbert_pool_factor": 2, "input_type": "document"}, None),
    ],
)
def test_what_contradicts_itself_is_refused(asked, refused) -> None:
    if refused is None:
        assert vector_options(fields(**asked), None).pool_factor == 2
    else:
        with pytest.raises(InvalidRequestError, match=refused):
            vector_options(fields(**asked), None)
