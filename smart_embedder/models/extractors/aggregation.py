"""Combine the scores of tokens into spans, as transformers' pipeline for token classification does.

A label may begin with `B-` (the first token of a span) or `I-` (a further one); one without either
counts as a further one. Tokens labelled `O` are outside all spans.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from smart_embedder.requests import Aggregation
from smart_embedder.results import FloatArray, Span
from smart_embedder.tokens import TokenSpans

OUTSIDE, _SPACE = "O", ord(" ")
Flags = npt.NDArray[np.bool_]


class LabelNames:
    """The labels of a model, in the order of its logits, and the names of the spans they make."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.begins: Flags = np.array([label.startswith("B-") for label in labels])
        tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
        # Numbers of the tags, as arrays of numbers are compared faster than strings.
        self.tags = np.array([tags.index(tag) for tag in tags])
        self._labels = tuple(labels)
        self._span_names = tuple(label.split("-", 1)[-1] for label in labels)

    def names(self, aggregation: Aggregation) -> tuple[str, ...]:
        """Return the name in a span of each label."""
        return self._labels if aggregation == "none" else self._span_names


def find_spans(
    text: str, tokens: TokenSpans, scores: FloatArray, names: LabelNames, aggregation: Aggregation
) -> Iterator[Span]:
    """Yield the spans in their order in the text, without those outside of all labels.

    `scores` `[tokens, labels]` are probabilities, of words if the aggregation combines them.
    """
    labels, best = scores.argmax(axis=1), scores.max(axis=1)
    joins = np.zeros(len(labels), np.bool_)
    if aggregation != "none":
        tags = names.tags[labels]
        joins[1:] = (tags[1:] == tags[:-1]) & ~names.begins[labels[1:]]
    first, named = _starts_of(joins), names.names(aggregation)
    for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(labels)], strict=True):
        label = named[labels[begin]]
        if label != OUTSIDE:
            start, stop = int(tokens.starts[begin]), int(tokens.stops[end - 1])
            yield Span(text[start:stop], start, stop, label, float(best[begin:end].mean()))


def join_words(
    tokens: TokenSpans, scores: FloatArray, continues: Flags, aggregation: Aggregation
) -> tuple[TokenSpans, FloatArray]:
    """Return the words of a text and the probabilities of their labels.

    `continues` marks the tokens that continue the word of the token before.
    """
    first = _starts_of(continues)
    last = [*first[1:] - 1, -1]
    words = TokenSpans(tokens.ids[first], tokens.starts[first], tokens.stops[last])
    if aggregation == "first":
        return words, scores[first]
    counts = np.diff([*first, len(scores)])
    if aggregation == "average":
        means = np.add.reduceat(scores, first, axis=0) / counts[:, None]
        return words, means.astype(np.float32)
    best = scores.max(axis=1)
    highest = np.maximum.reduceat(best, first)
    candidates = np.flatnonzero(best == np.repeat(highest, counts))
    return words, scores[candidates[np.searchsorted(candidates, first)]]


def softmax(logits: FloatArray) -> FloatArray:
    """Return the probabilities of the labels of each token."""
    scores: FloatArray = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores /= scores.sum(axis=1, keepdims=True)
    return scores


def starts_behind_spaces(text: str, spans: TokenSpans) -> Flags:
    """Return which tokens begin with or behind a space, or begin the text."""
    codes = np.frombuffer(f"{text}\0".encode("utf-32-le"), np.uint32)
    is_space = codes == _SPACE
    behind: Flags = is_space[spans.starts] | is_space[spans.starts - 1] | (spans.starts == 0)
    return behind


def _starts_of(joins: Flags) -> npt.NDArray[np.intp]:
    """Return the indices of the items that do not join the item before."""
    return np.flatnonzero(~joins | (np.arange(len(joins)) == 0))
