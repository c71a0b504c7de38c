"""How many texts a request may hold, whatever its dialect calls them."""

from collections.abc import Sequence

from app.errors import EmptyInputError, InvalidRequestError
from app.settings import Settings


def check_texts(texts: Sequence[str], field: str, settings: Settings) -> None:
    """Raise `EmptyInputError` where there are none, `InvalidRequestError` for too many."""
    _check(texts, field, settings.max_sentences_per_request, "MAX_SENTENCES_PER_REQUEST")


def check_passages(query: str, passages: Sequence[str], field: str, settings: Settings) -> None:
    """The same for the passages of a query, which must not be blank."""
    if not query.strip():
        raise EmptyInputError("the query is blank: send what the passages are to be judged by")
    _check(passages, field, settings.max_rerank_passages, "MAX_RERANK_PASSAGES")


def _check(texts: Sequence[str], field: str, most: int, setting: str) -> None:
    if not texts:
        raise EmptyInputError(f"the list {field} is empty: send at least one text")
    if len(texts) > most:
        raise InvalidRequestError(
            f"the list {field} holds {len(texts)} texts, and at most {most} are allowed "
            f"({setting}): send them in several requests"
        )
