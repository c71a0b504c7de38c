"""Token classifiers: every token of a text has a logit for each label of the model."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.kernels.target import Target
from smart_embedder.models.extractors.aggregation import (
    OUTSIDE,
    Flags,
    LabelNames,
    find_spans,
    join_words,
    softmax,
    starts_behind_spaces,
)
from smart_embedder.models.extractors.windows import WindowModel, divide, keep_middles
from smart_embedder.models.families.bert import is_encoder
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    TOKEN_CLASSES,
    TextOptions,
    name_labels,
    read_config,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.colbert import read_special_token
from smart_embedder.models.runner import OutputSpec
from smart_embedder.models.tokenizer import NO_IDS
from smart_embedder.requests import Aggregation, ExtractRequest
from smart_embedder.results import FloatArray, Span
from smart_embedder.tokens import TextWindows, TokenIds, TokenSpans
from smart_embedder.vector_space import SCORE

_HEAD = "classifier"
_DEFAULT_AGGREGATION: Aggregation = "simple"
# The numbers of a token that are held at once: its id and characters, in parts, joined and in
# windows, and those by which spans are found.
_TOKEN_BYTES = 16 * 8
# A number for each label of a token: the model's, those of joined windows, and their softmax twice.
_LABEL_BYTES = 4 * 4
# The most labels that an error names.
_MAX_NAMED = 50


class TokenClassifier(WindowModel):
    """Implements `smart_embedder.interface.Extractor`; results are logits `[tokens, labels]`."""

    default_threshold = 0.0
    reads_labels = False

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load the model; raises `StartupError` if the folder holds no token classifier."""
        config = read_config(folder)
        architectures = config.get("architectures") or [""]
        if not str(architectures[0]).endswith("ForTokenClassification"):
            raise StartupError(
                f"{folder} holds no model that labels tokens (architectures in config.json ends "
                "in ForTokenClassification)"
            )
        texts = replace(TextOptions.read(folder, TOKEN_CLASSES), message_format=None)
        if is_encoder(config):
            weights = Weights.read(folder)
            backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
            head = weights.linear(_HEAD, backbone.hidden_size, None)
            count, self._head = head.out_features, backbone.place_head(head)
        else:
            backbone, tokenizer = load_backbone(
                folder, target, max_length, texts, classifies="tokens"
            )
            count, self._head = backbone.hidden_size, nn.Identity()
        super().__init__(name, backbone, tokenizer)
        self.labels = name_labels(config, count)
        self._names = LabelNames(self.labels)
        self._before, self._after = (
            np.array([token.id for token in tokens], np.int64) for tokens in self.special_tokens
        )
        unknown = read_special_token(folder, "unk_token")
        self._unknown = None if unknown is None else tokenizer.token_id(unknown)
        steps = repr(self.labels)
        self._output_specs = {SCORE: OutputSpec("token", count, head=_HEAD, steps=steps)}

    def names(self, aggregation: Aggregation) -> tuple[str, ...]:
        """Return the labels that spans may have."""
        names = dict.fromkeys(self._names.names(aggregation))
        return tuple(name for name in names if name != OUTSIDE)

    def check_options(self, request: ExtractRequest) -> None:
        """Implement `smart_embedder.interface.Extractor`."""
        aggregation = request.aggregation or _DEFAULT_AGGREGATION
        known = self.names(aggregation)
        if not set(request.labels or ()) <= set(known):
            more = ", ..." if len(known) > _MAX_NAMED else ""
            raise InvalidRequestError(
                f"the option labels has one that {self.name} does not know: its labels, with the "
                f"aggregation {aggregation}, are {', '.join(known[:_MAX_NAMED])}{more}"
            )

    def token_bytes(self, request: ExtractRequest) -> int:
        """Implement `smart_embedder.interface.Extractor`."""
        del request
        return _TOKEN_BYTES + _LABEL_BYTES * len(self.labels)

    def tokenize_windows(
        self, request: ExtractRequest, check: Callable[[int], None]
    ) -> list[TextWindows]:
        """Implement `smart_embedder.interface.Extractor`."""
        size = self.max_length - len(self._before) - len(self._after)
        tokenized, count = list[TextWindows](), 0
        for text in request.texts:
            parts = [(NO_IDS, NO_IDS, NO_IDS)]
            for part in self.token_spans(text):
                count += len(part.ids)
                check(count)
                parts.append((part.ids, part.starts, part.stops))
            spans = TokenSpans(*map(np.concatenate, zip(*parts, strict=True)))
            windows = divide(len(spans.ids), size)
            sequences = [
                np.concatenate((self._before, spans.ids[window], self._after)) for window in windows
            ]
            tokenized.append(TextWindows(spans, windows, sequences))
        return tokenized

    def _score(
        self, states: torch.Tensor, places: list[slice], windows: list[TokenIds]
    ) -> list[torch.Tensor]:
        """Return the logits of each token, `[tokens, labels]`, without those of special tokens."""
        del windows
        logits, before, after = self._head(states).float(), len(self._before), len(self._after)
        return [logits[place.start + before : place.stop - after] for place in places]

    def find_spans(
        self, text: str, read: TextWindows, results: Sequence[FloatArray], request: ExtractRequest
    ) -> Iterator[Span]:
        """Implement `smart_embedder.interface.Extractor`."""
        if not results:
            return
        scores, tokens = softmax(keep_middles(read.windows, results)), read.spans
        aggregation = request.aggregation or _DEFAULT_AGGREGATION
        if aggregation not in {"none", "simple"}:
            continues = self._continues_word(text, tokens)
            tokens, scores = join_words(tokens, scores, continues, aggregation)
        yield from find_spans(text, tokens, scores, self._names, aggregation)

    def _continues_word(self, text: str, spans: TokenSpans) -> Flags:
        """Return which tokens continue a word, as transformers' pipeline finds them.

        A vocabulary that marks such tokens makes them longer than their characters. Of another one,
        they are the tokens without a space in front of them.
        """
        if self._tokenizer.marks_continuations:
            distinct, places = np.unique(spans.ids, return_inverse=True)
            lengths = np.array([len(token) for token in self._tokenizer.token_strings(distinct)])
            continues: Flags = lengths[places] != spans.stops - spans.starts
        else:
            continues = ~starts_behind_spaces(text, spans)
        return continues if self._unknown is None else continues & (spans.ids != self._unknown)


def is_gliner2(folder: Path) -> bool:
    """Whether the folder holds a model of GLiNER2; raises `StartupError` for one of GLiNER."""
    if (folder / "gliner_config.json").is_file():
        raise StartupError(
            f"{folder} holds a model of GLiNER, whose package needs transformers before 5.17, and "
            "this service a later one: take a model of GLiNER2"
        )
    return (folder / "encoder_config" / "config.json").is_file()
