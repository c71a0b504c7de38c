"""Checks of requests that every dialect shares."""

from collections.abc import Sequence

from app.engine.loaded_models import LoadedModels
from app.engine.options import Side
from app.errors import EmptyInputError, InvalidRequestError
from app.settings import Settings


def check_texts(
    texts: Sequence[object], field: str, settings: Settings, *, allowed: int = 0
) -> None:
    """Raise `EmptyInputError` where there are none, `InvalidRequestError` for too many.

    As many as `allowed` are never too many.
    """
    most = max(settings.max_sentences_per_request, allowed)
    _check(texts, field, most, "MAX_SENTENCES_PER_REQUEST")


def check_passages(
    query: str | Sequence[str], passages: Sequence[object], field: str, settings: Settings
) -> None:
    """The same for passages; raises `EmptyInputError` for a blank query, too."""
    if not all(map(str.strip, [query] if isinstance(query, str) else query)):
        raise EmptyInputError("the query is blank: send what the passages are to be judged by")
    _check(passages, field, settings.max_rerank_passages, "MAX_RERANK_PASSAGES")


def check_truncation(truncate: bool, side: Side) -> None:
    """Raise `InvalidRequestError` for a truncation side that has no effect without `truncate`."""
    if not truncate and side == "left":
        raise InvalidRequestError(
            "the option truncation_side has no effect without truncate: leave it out, or set "
            "truncate to true"
        )


def check_rerank_options(
    models: LoadedModels | None, *, instruction: str | None = None, weights: object = None
) -> None:
    """Raise `InvalidRequestError` for an option that the model would ignore."""
    if models is None or (models.reranker is None and not models.late_interaction):
        return  # The engine raises the error for that.
    reranker = models.reranker
    name = models.embedder.name if reranker is None else reranker.name
    if weights is not None and reranker is not None:
        raise InvalidRequestError(
            f"the option weights has no effect with the reranker {name}, which gives one score: "
            "leave it out (it is for RERANKER_MODEL=late-interaction)"
        )
    reads_instruction = reranker is not None and reranker.reads_instruction
    if instruction is not None and not reads_instruction:
        raise InvalidRequestError(
            f"the option instruction has no effect with the reranker {name}, which reads none: "
            "leave it out (it is for Qwen3-Reranker)"
        )


def _check(texts: Sequence[object], field: str, most: int, setting: str) -> None:
    if not texts:
        raise EmptyInputError(f"the list {field} is empty: send at least one text")
    if len(texts) > most:
        raise InvalidRequestError(
            f"the list {field} holds {len(texts)} texts, and at most {most} are allowed "
            f"({setting}): send them in several requests"
        )
