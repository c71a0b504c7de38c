"""The texts of a request that were truncated; they are reported, or refused."""

from app.engine.model import Model, Reranker
from app.engine.options import Side
from app.engine.types import TokenizedPair, TokenizedText, Truncation
from app.errors import TextTooLongError

_MOST_NAMED = 10


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
