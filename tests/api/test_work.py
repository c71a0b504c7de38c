"""From a request's fields to kinds of vectors, number types and the names of their models."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from smart_embedder.api.formats.vectors import VectorOptions
from smart_embedder.api.schemas import EmbeddingFields
from smart_embedder.api.work import EmbeddingWork, model_names, native_work
from smart_embedder.engine.model import DeviceInfo, LoadedModels
from smart_embedder.engine.records import Outputs
from smart_embedder.errors import InvalidRequestError


def of(name: str) -> SimpleNamespace:
    """A model that makes every kind."""
    return SimpleNamespace(name=name, kinds=Outputs(dense=True, sparse=True, colbert=True))


MODELS = LoadedModels(of("bge"), DeviceInfo("cpu", "CPU", "float32", "none"), 100)


def work_for(accept: str = "json", **values: object) -> tuple[EmbeddingWork, VectorOptions]:
    fields = EmbeddingFields.model_validate(values)
    return native_work(fields, None, MODELS, accept, ["arrow", "msgpack"])


@pytest.mark.parametrize(("dense", "name"), [(None, "bge"), ("qwen", "qwen")])
def test_a_kind_is_told_with_the_model_that_makes_it(dense, name) -> None:
    named = model_names(replace(MODELS, dense=dense and of(dense)))
    assert list(named.values()) == [name, name, "bge", "bge"]


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
        work_for(accept, **asked)
    else:
        with pytest.raises(InvalidRequestError, match=refused):
            work_for(accept, **asked)


def test_kinds_are_those_that_the_request_names_and_else_those_that_are_made() -> None:
    work, options = work_for(return_sparse=False, output_dtype="int8", dimensions=3)
    assert options.outputs == Outputs(dense=True, colbert=True)
    assert (work.outputs, work.normalize) == (options.outputs, True)
    assert (options.dtype, options.pool_factor, options.muvera) == ("int8", None, None)
    nothing = dict.fromkeys(("return_dense", "return_sparse", "return_colbert"), False)
    with pytest.raises(InvalidRequestError, match="nothing is asked for"):
        work_for(**nothing)
    work, options = work_for(**nothing, muvera="query")
    assert (options.outputs, options.muvera) == (Outputs(), "query")
    assert (work.outputs, work.normalize) == (Outputs(colbert=True), False)


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
        assert work_for(**asked)[1].pool_factor == 2
    else:
        with pytest.raises(InvalidRequestError, match=refused):
            work_for(**asked)
