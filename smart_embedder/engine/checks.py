"""What the engine refuses: options without effect, texts that are too long, answers too large.

The options of a request are checked against the models that serve it.
"""

import sys

from smart_embedder.engine.model import Embedder, LoadedModels, Model, Reranker
from smart_embedder.engine.records import (
    EmbeddingOptions,
    InputType,
    Outputs,
    Side,
    TokenizedPair,
    TokenizedText,
    Truncation,
)
from smart_embedder.errors import InvalidRequestError, KindNotMadeError, TextTooLongError
from smart_embedder.settings.types import MAX_PROMPT_CHARACTERS

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
# Texts that an error names.
_MOST_NAMED = 10
# What an answer may hold for each byte of its request's body. The texts themselves and what reading
# them takes may hold as much again.
BYTES_PER_BODY_BYTE = 10


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
        if not 0 < len(options.prompt) <= MAX_PROMPT_CHARACTERS:
            raise InvalidRequestError(
                f"the option prompt has {len(options.prompt)} characters: send 1 to "
                f"{MAX_PROMPT_CHARACTERS}, or leave it out"
            )
        return options.prompt
    name = str(options.prompt_name)
    if name not in model.prompts:
        known = f"it has {', '.join(model.prompts)}" if model.prompts else "it has no prompts"
        raise InvalidRequestError(f"the option prompt_name is unknown to {model.name}: {known}")
    return model.prompts[name]


def has_prompt_for(model: Embedder, input_type: InputType) -> bool:
    """Whether this input type changes how the model reads texts."""
    return model.reads_input_type or any(
        name in model.prompts for name in _PROMPT_NAMES[input_type]
    )


def text_truncations(
    model: Model, texts: list[TokenizedText], field: str, side: Side
) -> list[Truncation]:
    """The texts of `field` that were cut, from `side`."""
    return [
        Truncation(
            field=field,
            index=index,
            model=model.name,
            max_tokens=len(text.ids),
            original_tokens=text.original_tokens,
            side=side,
            exact=text.exact,
        )
        for index, text in enumerate(texts)
        if text.truncated
    ]


def pair_truncations(model: Reranker, pairs: list[TokenizedPair], side: Side) -> list[Truncation]:
    """The query, if it was cut in any pair, and the passages that were cut from `side`."""
    worst = min(pairs, key=lambda pair: pair.query_kept)
    cuts = []
    if worst.query_kept < worst.query_tokens:
        kept, had = worst.query_kept, worst.query_tokens
        cuts.append(Truncation("query", 0, model.name, kept, had, exact=worst.query_exact))
    for index, pair in enumerate(pairs):
        if pair.passage_kept < pair.passage_tokens:
            kept, had = pair.passage_kept, pair.passage_tokens
            exact = pair.passage_exact
            cuts.append(Truncation("passages", index, model.name, kept, had, side, exact))
    return cuts


def refuse_truncation(truncations: list[Truncation]) -> None:
    """Raise `TextTooLongError`, which names the first text, if any text was truncated."""
    if truncations:
        problems = [
            {"pointer": cut.pointer, "message": _too_long(cut)} for cut in truncations[:_MOST_NAMED]
        ]
        raise TextTooLongError(problems[0]["message"], problems)


def _too_long(cut: Truncation) -> str:
    text = "the query" if cut.field == "query" else f"the text at index {cut.index}"
    count = cut.original_tokens if cut.exact else f"at least {cut.original_tokens}"
    return (
        f"{text} has {count} tokens, and {cut.model} reads at most {cut.max_tokens} of it: "
        "shorten it, or let the option truncate cut it"
    )


class AnswerMemory:
    """Refuses an answer of more than `allowed` bytes; by default there is no limit.

    `size` is always that of the whole answer, as far as it is known: of token ids, of vectors, of
    what else is kept until the client has read it. What a forward needs on its device meanwhile is
    limited by the token budget. `body_bytes` are those of the body, unpacked, that have arrived.
    """

    def __init__(self, allowed: int = sys.maxsize) -> None:
        self._allowed = allowed
        self._size = 0
        self.body_bytes = 0

    @property
    def allowed(self) -> int:
        """The most bytes that the answer may hold."""
        return self._allowed

    @property
    def held(self) -> int:
        """How many bytes are held until the answer is read, the texts of the body included."""
        return self._size + self.body_bytes

    def check(self, size: int, what: str, advice: str) -> None:
        """Raise `InvalidRequestError` if `what` is too large; safe to call from any thread."""
        if size > self.allowed:
            raise InvalidRequestError(
                f"{what} need {size} bytes, and this answer may hold {self.allowed} "
                f"(MAX_ANSWER_BYTES, and {BYTES_PER_BODY_BYTE} for each byte of the body): {advice}"
            )

    def need(self, size: int, what: str, advice: str) -> None:
        """Hold `size` bytes until the answer is read.

        Raises as `check`, and `QueueFullError` where other answers leave no room at present.
        """
        self.check(size, what, advice)
        self._size = max(self._size, size)

    def need_more(self, size: int, what: str, advice: str) -> None:
        """Hold `size` bytes beside those that were needed before; raises as `need`."""
        self.need(self._size + size, what, advice)


UNLIMITED = AnswerMemory()
