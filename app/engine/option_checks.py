"""Checks the options of an embedding request against the models: one without effect is refused."""

from app.engine.loaded_models import LoadedModels
from app.engine.model import Embedder
from app.engine.options import EmbeddingOptions, InputType
from app.engine.types import Outputs
from app.errors import InvalidRequestError, KindNotMadeError
from app.settings.types import MAX_PROMPT_CHARACTERS

# What sentence-transformers' encode_query and encode_document look for, in this order.
_PROMPT_NAMES: dict[InputType | None, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus"),
}
_KINDS = {
    "dense": "dense vectors",
    "sparse": "sparse vectors",
    "colbert": "ColBERT vectors",
    "states": "vectors of tokens",
}


def wanted_kinds(
    models: LoadedModels,
    *,
    dense: bool | None,
    sparse: bool | None,
    colbert: bool | None,
    states: bool = False,
) -> Outputs:
    """The kinds of vectors that a request asks for; None stands for what the models make."""
    available = models.kinds
    return Outputs(
        available.dense if dense is None else dense,
        available.sparse if sparse is None else sparse,
        available.colbert if colbert is None else colbert,
        states,
    )


def check_options(models: LoadedModels, outputs: Outputs, options: EmbeddingOptions) -> None:
    """Check the kinds of vectors and every option but prompts, which `find_prompt` checks.

    Raises `InvalidRequestError` for an option that would have no effect, and `KindNotMadeError` for
    a kind of vectors that no model makes.
    """
    _check_kinds(models, outputs)
    if options.dimensions is not None:
        _check_dimensions(models.dense_model, outputs, options.dimensions)
    if options.return_tokens and not (outputs.sparse or outputs.colbert):
        raise InvalidRequestError(
            "the option return_tokens has no effect on dense vectors, which no token stands "
            "behind: leave it out, or ask for sparse or colbert"
        )


def _check_kinds(models: LoadedModels, outputs: Outputs) -> None:
    available = models.kinds
    for kind, vectors in _KINDS.items():
        if getattr(outputs, kind) and not getattr(available, kind):
            known = ", ".join(known for each, known in _KINDS.items() if getattr(available, each))
            makers = dict.fromkeys((models.dense_model.name, models.embedder.name))
            verb = "make" if len(makers) > 1 else "makes"
            raise KindNotMadeError(
                f"{vectors} are not made here: {' and '.join(makers)} {verb} {known}"
            )


def _check_dimensions(model: Embedder, outputs: Outputs, dimensions: int) -> None:
    width, fewest = model.dense_width, model.min_dimensions
    if not outputs.dense:
        raise InvalidRequestError(
            "the option dimensions has no effect without dense vectors: leave it out, or ask for "
            "dense"
        )
    if dimensions == width:
        return
    if dimensions > width:
        raise InvalidRequestError(
            f"the option dimensions is {dimensions}, and a vector of {model.name} has {width}: "
            "leave it out"
        )
    if fewest is None:
        raise InvalidRequestError(
            f"the option dimensions is {dimensions}, and {model.name} was not trained for fewer "
            f"than its {width} dimensions: leave it out, or ask a server whose dense model is "
            "Qwen3-Embedding"
        )
    if dimensions < fewest:
        raise InvalidRequestError(
            f"the option dimensions is {dimensions}: {model.name} gives {fewest} to {width}"
        )


def find_prompt(models: LoadedModels, outputs: Outputs, options: EmbeddingOptions) -> str:
    """The prompt that the dense model reads: the one that the options name, else its default.

    Raises `InvalidRequestError` for a prompt that would have no effect, or that is unknown.
    """
    given = [name for name in ("prompt", "prompt_name") if getattr(options, name) is not None]
    of_type = options.input_type is not None or bool(options.preferred_prompts)
    if len(given) + of_type > 1:
        excluded = [*given, *(["input_type"] if of_type else [])]
        raise InvalidRequestError(
            f"the options {' and '.join(excluded)} exclude each other: send one"
        )
    model = models.dense_model
    if not given:
        names = options.preferred_prompts + _PROMPT_NAMES.get(options.input_type, ())
        return next(
            (model.prompts[each] for each in names if each in model.prompts), model.default_prompt
        )
    if models.dense is not None and not (outputs.dense or outputs.states):
        raise InvalidRequestError(
            f"the option {given[0]} has no effect without dense vectors: it is for {model.name}, "
            "which makes these alone"
        )
    if options.prompt is not None:
        return _checked(options.prompt)
    name = str(options.prompt_name)
    if name not in model.prompts:
        known = f"it has {', '.join(model.prompts)}" if model.prompts else "it has no prompts"
        raise InvalidRequestError(f"the option prompt_name is unknown to {model.name}: {known}")
    return model.prompts[name]


def _checked(prompt: str) -> str:
    if not 0 < len(prompt) <= MAX_PROMPT_CHARACTERS:
        raise InvalidRequestError(
            f"the option prompt has {len(prompt)} characters: send 1 to {MAX_PROMPT_CHARACTERS}, "
            "or leave it out"
        )
    return prompt


def has_prompt_for(model: Embedder, input_type: InputType) -> bool:
    """Whether this input type changes how the model reads texts."""
    return model.reads_input_type or any(
        name in model.prompts for name in _PROMPT_NAMES[input_type]
    )
