"""From a request's fields to kinds of vectors, number types and the names of their models."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from smart_embedder.api.endpoints.native import made_by, native_request
from smart_embedder.api.schemas import EmbeddingFields
from smart_embedder.engine.model import DeviceInfo, LoadedModels
from smart_embedder.engine.records import EmbedRequest, Outputs
from smart_embedder.errors import InvalidRequestError
from smart_embedder.vectors import ColbertForm
from tests.support.formats import ARROW, JSON


def of(name: str) -> SimpleNamespace:
    """A model that makes every kind."""
    kinds = Outputs(dense=True, sparse=True, colbert=True)
    return SimpleNamespace(name=name, kinds=kinds, spaces={}, precision=f"of {name}")


MODELS = LoadedModels(of("bge"), (DeviceInfo("cpu", "CPU", "float32", "none"),), 100)


def asked_by(accept: str = JSON, **values: object) -> EmbedRequest:
    fields = EmbeddingFields.model_validate(values)
    return native_request(fields, ["a"], MODELS, accept)


@pytest.mark.parametrize(("dense", "name"), [(None, "bge"), ("qwen", "qwen")])
def test_a_kind_is_told_with_the_model_that_makes_it(dense, name) -> None:
    told = made_by(replace(MODELS, dense=dense and of(dense)), EmbedRequest([]))
    assert list(told.values())[:4] == [name, name, "bge", "bge"]
    assert told["precision"] == {"dense": f"of {name}", "sparse": None, "colbert": None}


@pytest.mark.parametrize(
    ("accept", "asked", "refused"),
    [
        (JSON, {}, None),
        (JSON, {"output_dtype": "int8"}, None),
        (JSON, {"output_dtype": "float16"}, "JSON has no numbers for"),
        (JSON, {"output_dtype": "bfloat16"}, f"ask for {ARROW}, .* in Accept"),
        (JSON, {"output_dtype": "float16", "encoding": "base64"}, None),
        (JSON, {"encoding": "base64"}, None),
        (ARROW, {"output_dtype": "float16"}, None),
        (ARROW, {"encoding": "base64"}, "the option encoding is for JSON"),
        (JSON, {"truncate": False, "truncation_side": "left"}, "truncation_side"),
        (JSON, {"colbert_pool_factor": 2, "input_type": "query"}, "these are queries"),
        (JSON, {"colbert_pool_factor": 2, "return_tokens": True}, "exclude each other"),
        (JSON, {"colbert_pool_factor": 2, "input_type": "document"}, None),
    ],
)
def test_a_format_holds_the_numbers_and_options_agree_or_it_is_said(accept, asked, refused) -> None:
    with pytest.raises(InvalidRequestError, match=refused) if refused else nullcontext():
        assert asked_by(accept, **asked).texts == ["a"]


def test_kinds_are_those_that_the_request_names_and_else_those_that_are_made() -> None:
    request = asked_by(return_sparse=False, output_dtype="int8", dimensions=3)
    assert (request.texts, request.outputs) == (["a"], Outputs(dense=True, colbert=True))
    assert request.needed == replace(request.outputs, form=ColbertForm("int8"))
    assert request.normalize_dense
    assert (request.output_dtype, request.colbert_pool_factor) == ("int8", None)
    nothing = dict.fromkeys(("return_dense", "return_sparse", "return_colbert"), False)
    with pytest.raises(InvalidRequestError, match="nothing is asked for"):
        asked_by(**nothing)
    request = asked_by(**nothing, muvera="query")
    assert (request.outputs, request.muvera) == (Outputs(), "query")
    form = ColbertForm(None, "query")
    assert (request.needed, request.normalize_dense) == (Outputs(colbert=True, form=form), False)
