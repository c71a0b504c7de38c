"""Combine the scores of tokens into spans, as transformers' pipeline for token classification does.

A label may begin with `B-` (the first token of a span) or `I-` (a further one); one without either
counts as a further one. Tokens labelled `O` are outside all spans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from smart_embedder.requests import Aggregation
from smart_embedder.results import FloatArray, Span
from smart_embedder.tokens import TokenSpans

_OUTSIDE, _SPACE = "O", ord(" ")
Flags = npt.NDArray[np.bool_]


class LabelNames:
    """The labels of a model, in the order of its logits, and the names of the spans they make."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.begins: Flags = np.array([label.startswith("B-") for label in labels])
        tags = [label[2:] if label.startswith(("B-", "I-")) else label for label in labels]
        # Numbers of the tags, as arrays of numbers are compared faster than strings.
        self.tags = np.array([tags.index(tag) for tag in tags])
        self.span_names = tuple(label.split("-", 1)[-1] for label in labels)

    def names(self, aggregation: Aggregation) -> tuple[str, ...]:
        """Return the name in a span of each label."""
        return self.labels if aggregation == "none" else self.span_names


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The tokens of a text with the probability of each label, `[tokens, labels]`.

    `continues` marks the tokens that continue the word of the token before.
    """

    text: str
    spans: TokenSpans
    scores: FloatArray
    continues: Flags

    def find_spans(self, names: LabelNames, aggregation: Aggregation) -> Iterator[Span]:
        """Yield the spans in their order in the text, without those outside of all labels."""
        starts, stops, scores = self.spans.starts, self.spans.stops, self.scores
        if aggregation not in {"none", "simple"}:
            first = _starts_of(self.continues)
            scores = _score_words(scores, first, aggregation)
            starts, stops = starts[first], stops[[*first[1:] - 1, -1]]
        labels, best = scores.argmax(axis=1), scores.max(axis=1)
        first = np.arange(len(labels))
        if aggregation != "none":
            tags = names.tags[labels]
            joins = np.zeros(len(labels), np.bool_)
            joins[1:] = (tags[1:] == tags[:-1]) & ~names.begins[labels[1:]]
            first = _starts_of(joins)
        named = names.names(aggregation)
        for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(labels)], strict=True):
            label = named[labels[begin]]
            if label != _OUTSIDE:
                start, stop = int(starts[begin]), int(stops[end - 1])
                score = float(best[begin:end].mean())
                yield Span(self.text[start:stop], start, stop, label, score)


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


def _score_words(
    scores: FloatArray, first: npt.NDArray[np.intp], aggregation: Aggregation
) -> FloatArray:
    """Return the probabilities of each word, whose tokens begin at `first`: `[words, labels]`."""
    if aggregation == "first":
        return scores[first]
    counts = np.diff([*first, len(scores)])
    if aggregation == "average":
        return (np.add.reduceat(scores, first, axis=0) / counts[:, None]).astype(np.float32)
    best = scores.max(axis=1)
    highest = np.maximum.reduceat(best, first)
    candidates = np.flatnonzero(best == np.repeat(highest, counts))
    return scores[candidates[np.searchsorted(candidates, first)]]
