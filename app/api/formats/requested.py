"""From a request's fields to the kinds of vectors, their number types, and their models."""

from dataclasses import replace

from app.api.checks import check_truncation
from app.api.formats.answer import ModelNames, VectorOptions
from app.api.model_catalogue import ServedModel
from app.api.schemas import EmbeddingFields
from app.engine.loaded_models import LoadedModels
from app.engine.option_checks import wanted_kinds
from app.engine.types import Outputs
from app.errors import InvalidRequestError
from app.settings import Settings
from app.settings.model_names import public_name

_NOT_IN_JSON = ("float16", "bfloat16")


def vector_options(fields: EmbeddingFields, models: LoadedModels | None) -> VectorOptions:
    """The options of vectors; raises `InvalidRequestError` for ones that contradict each other."""
    outputs = _kinds(fields, models)
    if not (outputs or fields.muvera):
        raise InvalidRequestError(
            "nothing is asked for: set return_dense, return_sparse or return_colbert to true"
        )
    check_truncation(fields.truncate, fields.truncation_side)
    options = VectorOptions(outputs, fields.output_dtype, fields.colbert_pool_factor, fields.muvera)
    options.check(queries=fields.input_type == "query", tokens=fields.return_tokens)
    return options


def _kinds(fields: EmbeddingFields, models: LoadedModels | None) -> Outputs:
    """The kinds that are asked for; a kind that the request leaves out is made if it can be."""
    if models is None:  # The engine raises the error for that.
        return Outputs(fields.return_dense, fields.return_sparse, fields.return_colbert)
    said = fields.model_fields_set
    return wanted_kinds(
        models,
        dense=fields.return_dense if "return_dense" in said else None,
        sparse=fields.return_sparse if "return_sparse" in said else None,
        colbert=fields.return_colbert if "return_colbert" in said else None,
    )


def check_numbers(fields: EmbeddingFields, media_type: str, binary: list[str]) -> None:
    """Raise `InvalidRequestError` for a number type that a format not in `binary` cannot hold."""
    is_json = media_type not in binary
    if is_json and fields.encoding != "base64" and fields.output_dtype in _NOT_IN_JSON:
        raise InvalidRequestError(
            f"the option output_dtype is {fields.output_dtype}, which JSON has no numbers for: set "
            f"encoding to base64, or ask for {', '.join(binary)} in Accept"
        )
    if not is_json and fields.encoding == "base64":
        raise InvalidRequestError(
            f"the option encoding is for JSON, and Accept asks for {media_type}: send one of them"
        )


def as_asked_for(models: LoadedModels | None, model: ServedModel | None) -> LoadedModels | None:
    """The models for a request that names `model`: the default embedder, named, works alone."""
    if models is None or model is None or not model.is_default_embedder:
        return models
    return replace(models, dense=None)


def model_names(settings: Settings, model: ServedModel | None = None) -> ModelNames:
    """The model of each kind of vectors; `model` is the one that the request names."""
    if model is not None and (model.further or model.is_default_embedder):
        return ModelNames(dense=model.name, sparse=model.name, colbert=model.name)
    bge = public_name(settings.embedding_model)
    return ModelNames(dense=public_name(settings.dense_model), sparse=bge, colbert=bge)
