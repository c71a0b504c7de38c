"""Validation of requests: refuse options without effect, and texts that are too long."""

from collections.abc import Sequence

from smart_embedder.errors import (
    EmptyInputError,
    InvalidRequestError,
    KindNotMadeError,
    TextTooLongError,
)
from smart_embedder.interface import (
    PROMPT_NAMES,
    Embedder,
    LoadedModels,
    Model,
    Reranker,
)
from smart_embedder.requests import (
    EmbedRequest,
    ImageInput,
    Outputs,
    RerankRequest,
    Side,
    TruncationOptions,
)
from smart_embedder.results import Truncation
from smart_embedder.settings import MAX_PROMPT_CHARACTERS
from smart_embedder.tokens import TokenizedPair, TokenizedText

_KINDS = {
    "dense": "dense vectors",
    "sparse": "sparse vectors",
    "colbert": "ColBERT vectors",
}
# The most texts that an error names.
_MAX_PROBLEMS = 10


def check_embedding(models: LoadedModels, request: EmbedRequest) -> str:
    """Check the outputs and the options of a request; return the prompt of the dense model.

    Raises `InvalidRequestError` if no output is asked for or an option has no effect, and
    `KindNotMadeError` for a kind of vectors that no model computes.
    """
    outputs, available = request.needed, models.kinds
    if not outputs:
        raise InvalidRequestError("nothing is asked for: choose dense, sparse or colbert")
    for kind, vectors in _KINDS.items():
        if getattr(outputs, kind) and not getattr(available, kind):
            known = ", ".join(name for other, name in _KINDS.items() if getattr(available, other))
            makers = dict.fromkeys((models.dense_model.name, models.embedder.name))
            verb = "make" if len(makers) > 1 else "makes"
            raise KindNotMadeError(
                f"{vectors} are not made here: {' and '.join(makers)} {verb} {known}"
            )
    if request.dimensions is not None:
        _check_dimensions(models.dense_model, outputs, request.dimensions)
    needed = {models.dense_model} if outputs.dense else set()
    needed |= {models.embedder} if outputs.sparse or outputs.colbert else set()
    for model in needed:
        check_images(request.texts, model)
    if request.return_tokens and not (outputs.sparse or outputs.colbert):
        raise InvalidRequestError(
            "the option return_tokens has no effect on dense vectors, which no token stands "
            "behind: leave it out, or ask for sparse or colbert"
        )
    prompt = _find_prompt(models, outputs, request)
    _check_text_options(models, request)
    return prompt


def _check_text_options(models: LoadedModels, request: EmbedRequest) -> None:
    """Raise `InvalidRequestError` for options of texts that do not fit these inputs."""
    embedder, has_texts = models.embedder, str in set(map(type, request.texts))
    reads_prompt = has_texts or getattr(models.dense_model, "reads_image_prompts", False)
    for option in ("prompt", "prompt_name"):
        if getattr(request, option) is not None and not reads_prompt:
            raise InvalidRequestError(
                f"the option {option} has no effect on pictures: leave it out"
            )
    are_queries = has_texts and getattr(embedder, "reads_texts_as_queries", False)
    if request.colbert_pool_factor is not None and are_queries:
        raise InvalidRequestError(
            f"the option colbert_pool_factor is for documents, and {embedder.name} reads texts as "
            "queries, which need all of their vectors: leave it out, or send pictures alone"
        )


def check_images(texts: Sequence[str | ImageInput], model: Model) -> None:
    """Raise `InvalidRequestError` for pictures if the model reads only texts."""
    if ImageInput in set(map(type, texts)) and not getattr(model, "reads_images", False):
        raise InvalidRequestError(
            f"{model.name} reads no pictures: send texts, or ask a model that reads them"
        )


def _check_dimensions(model: Embedder, outputs: Outputs, dimensions: int) -> None:
    width, minimum = model.dense_width, model.min_dimensions
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
    if minimum is None:
        raise InvalidRequestError(
            f"the option dimensions is {dimensions}, and {model.name} was not trained for fewer "
            f"than its {width} dimensions: leave it out, or ask a server whose dense model is "
            "Qwen3-Embedding"
        )
    if dimensions < minimum:
        raise InvalidRequestError(
            f"the option dimensions is {dimensions}: {model.name} gives {minimum} to {width}"
        )


def _find_prompt(models: LoadedModels, outputs: Outputs, request: EmbedRequest) -> str:
    """Return the prompt of the dense model: the one that the request selects, else its default."""
    model, prompt, name = models.dense_model, request.prompt, request.prompt_name
    has_type = request.input_type is not None or bool(request.preferred_prompts)
    options = {
        "prompt": prompt is not None,
        "prompt_name": name is not None,
        "input_type": has_type,
    }
    if sum(options.values()) > 1:
        given = " and ".join(option for option, is_given in options.items() if is_given)
        raise InvalidRequestError(f"the options {given} exclude each other: send one")
    is_named = prompt is not None or name is not None
    if is_named and models.dense is not None and not outputs.dense:
        raise InvalidRequestError(
            f"the option {'prompt_name' if prompt is None else 'prompt'} has no effect without "
            f"dense vectors: it is for {model.name}, which makes these alone"
        )
    if prompt is not None:
        if not 0 < len(prompt) <= MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(
                f"the option prompt has {len(prompt)} characters: send 1 to "
                f"{MAX_PROMPT_CHARACTERS}, or leave it out"
            )
        return prompt
    if name is not None:
        if name not in model.prompts:
            known = f"it has {', '.join(model.prompts)}" if model.prompts else "it has no prompts"
            raise InvalidRequestError(f"the option prompt_name is unknown to {model.name}: {known}")
        return model.prompts[name]
    for candidate in request.preferred_prompts + PROMPT_NAMES[request.input_type]:
        if candidate in model.prompts:
            return model.prompts[candidate]
    return model.default_prompt


def check_reranking(request: RerankRequest) -> None:
    """Raise `EmptyInputError` if there are no passages or the query is blank."""
    if not request.passages:
        raise EmptyInputError("there are no passages to score")
    if not request.query.strip():
        raise EmptyInputError("the query is blank")


def text_truncations(
    model: Model, texts: list[TokenizedText], field: str, side: Side
) -> list[Truncation]:
    """Return the truncations of the texts of `field`, which were cut from `side`."""
    return [
        Truncation(field, index, model.name, len(text.ids), text.original_tokens, side, text.exact)
        for index, text in enumerate(texts)
        if text.truncated
    ]


def pair_truncations(model: Reranker, pairs: list[TokenizedPair], side: Side) -> list[Truncation]:
    """Return the truncations of the query and of the passages, which were cut from `side`.

    The query has one truncation: that of the pair in which the fewest of its tokens were kept.
    """
    query = min((pair.query for pair in pairs), key=lambda query: query.kept)
    texts = [("query", 0, query), *(("passages", i, pair.passage) for i, pair in enumerate(pairs))]
    return [
        Truncation(
            field,
            index,
            model.name,
            text.kept,
            text.total,
            "right" if field == "query" else side,
            text.exact,
        )
        for field, index, text in texts
        if text.truncated
    ]


def check_truncations(truncations: list[Truncation], options: TruncationOptions) -> None:
    """Raise `TextTooLongError` with the first texts if texts were cut without `truncate`."""
    if truncations and not options.truncate:
        problems = [
            {"pointer": truncation.pointer, "message": _explain_too_long(truncation)}
            for truncation in truncations[:_MAX_PROBLEMS]
        ]
        raise TextTooLongError(problems[0]["message"], problems)


def _explain_too_long(truncation: Truncation) -> str:
    is_query = truncation.field == "query"
    text = "the query" if is_query else f"the text at index {truncation.index}"
    tokens = truncation.original_tokens
    count = tokens if truncation.exact else f"at least {tokens}"
    return (
        f"{text} has {count} tokens, and {truncation.model} reads at most "
        f"{truncation.max_tokens} of it: shorten it, or let the option truncate cut it"
    )
