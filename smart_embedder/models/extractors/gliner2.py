"""GLiNER2: a model that reads the labels of a request before a text, and scores spans of words.

The package `gliner2` makes the inputs, and its modules compute the scores behind the encoder. This
service computes the encoder as any other, and chooses spans as `extract_entities` of the package.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from smart_embedder.errors import InvalidRequestError, StartupError
from smart_embedder.interrupts import stop_if_given_up
from smart_embedder.kernels.target import Target
from smart_embedder.models.extractors.windows import WindowModel, divide, keep_middles
from smart_embedder.models.families.auto_model import load_by_transformers
from smart_embedder.models.families.module_loading import add_preemption_points
from smart_embedder.models.files.config import read_config
from smart_embedder.models.files.record import current_record
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.runner import OutputSpec
from smart_embedder.models.tokenizer import CHARACTERS_PER_TOKEN, NO_IDS, TextTokenizer
from smart_embedder.requests import ExtractRequest
from smart_embedder.results import FloatArray, Span
from smart_embedder.tokens import ArrayTokens, TextWindows, TokenIds, TokenSpans
from smart_embedder.vector_space import SCORE

# Of all labels: they may take half of a window.
_MAX_LABEL_CHARACTERS = 16_384
# The package's expression for words takes quadratic time for a run of these characters.
_MAX_RUN = 512
_RUN = re.compile(rf"[A-Za-z0-9._%+-]{{{_MAX_RUN + 1}}}")
# The share of a window that one word may have, so that neighbours overlap by an eighth.
_WORDS_PER_WINDOW = 8
# The bytes of a character and its tokens, of a word, and of a score: of the model, joined and
# compared.
_CHARACTER_BYTES, _WORD_BYTES, _SCORE_BYTES = 128, 512, 4 * 4
# The words that are tokenized, or compared, before a look at whether the request goes on.
_WORDS_AT_ONCE = 4096
_WITHOUT_LABELS: dict[str, Any] = {"words": slice(None), "labels": [0, 0]}
# In place of scores where the model predicts no span: below any threshold.
_NO_SPAN = -1.0
# The token ids of a word, and where it begins and ends in its text.
_Word = tuple[TokenIds, int, int]


class Gliner2Extractor(WindowModel):
    """Implements `smart_embedder.interface.Extractor`; a result is `[words x labels, widths]`.

    The number `k` of a word and a label is the score of the `k + 1` words from that word on.
    """

    default_threshold = 0.5
    reads_labels = True
    labels: tuple[str, ...] = ()

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load the model; raises `StartupError` if it, or the package, cannot be used."""
        config = read_config(folder)
        if record := current_record():  # The package reads all fields.
            record.read_all_fields(folder / "config.json", ())
        kind = config.get("architecture", "span"), config.get("token_pooling", "first")
        if kind != ("span", "first"):
            raise StartupError(
                f"the model in {folder} has the architecture {kind[0]} and the token_pooling "
                f"{kind[1]}, and of GLiNER2 only span and first are computed"
            )

        def load() -> tuple[Any, Any]:
            self._model = _load_model(folder).to(target.device).eval()
            encoder = self._model.encoder
            if not target.quantized:
                encoder.to(target.dtype)
            add_preemption_points(encoder)
            return encoder, encoder

        def read_tokenizer(positions: int) -> TextTokenizer:
            return TextTokenizer.from_folder(folder, min(max_length, positions))

        super().__init__(name, *load_by_transformers(folder, target, read_tokenizer, load=load))
        self._processor = self._model.processor
        self._widths: int = self._model.max_width
        steps = repr((self._widths, config.get("counting_layer")))
        self._output_specs = {SCORE: OutputSpec("span", self._widths, steps=steps)}

    def check_options(self, request: ExtractRequest) -> None:
        """Implement `smart_embedder.interface.Extractor`."""
        if request.aggregation is not None:
            raise InvalidRequestError(
                f"the option aggregation has no effect on {self.name}, which scores whole spans: "
                "leave it out"
            )
        if not request.labels:
            raise InvalidRequestError(
                f"the option labels is required for {self.name}: name the kinds of spans to find"
            )
        if (characters := sum(map(len, request.labels))) > _MAX_LABEL_CHARACTERS:
            raise InvalidRequestError(
                f"the option labels has {characters} characters, and {self.name} reads at most "
                f"{_MAX_LABEL_CHARACTERS}: send several requests"
            )
        borders = self._processor.SPECIAL_TOKENS
        if any(token in label for token in borders for label in request.labels):
            raise InvalidRequestError(
                f"the option labels has a token that {self.name} reads as the border of labels "
                f"({', '.join(borders)}): leave it out"
            )

    def token_bytes(self, request: ExtractRequest) -> int:
        """Implement `smart_embedder.interface.Extractor`."""
        return _WORD_BYTES + _SCORE_BYTES * self._widths * len(request.labels or ())

    def tokenize_windows(
        self, request: ExtractRequest, check: Callable[[int], None]
    ) -> list[TextWindows]:
        """Implement `smart_embedder.interface.Extractor`."""
        schema = {"entities": dict.fromkeys(request.labels or (), "")}
        record = self._processor.transform_record(".", schema)
        before = np.array(record.input_ids[: record.text_word_first_positions[0]], np.int64)
        labels = np.array(record.schema_special_positions[0], np.int64)
        if len(before) > self.max_length // 2:
            raise InvalidRequestError(
                f"the labels take {len(before)} tokens, and may take half of the {self.max_length} "
                f"that {self.name} reads at once: send fewer or shorter ones"
            )
        tokenized, count, word_bytes = list[TextWindows](), 0, self.token_bytes(request)
        for index, text in enumerate(request.texts):
            check(count + _CHARACTER_BYTES * len(text) // word_bytes)
            words = []
            for word in self._read_words(index, text):
                words.append(word)
                check(count + len(words))
            count += len(words)
            tokenized.append(self._divide(index, words, len(text), before, labels))
        return tokenized

    def _read_words(self, index: int, text: str) -> Iterator[_Word]:
        """Yield the words of a text, and a full stop where the package adds one.

        Raises `InvalidRequestError` for a text whose words the package cannot find in time.
        """
        if _RUN.search(text):
            raise _long_word_error(index, f"{_MAX_RUN} characters")
        if not text.strip():
            return
        end = "" if text.endswith((".", "!", "?")) else "."
        words = self._processor.word_splitter(text + end)
        while part := list(islice(words, _WORDS_AT_ONCE)):
            stop_if_given_up()
            distinct = list({word for word, _, _ in part})
            limit = CHARACTERS_PER_TOKEN * self.max_length
            if max(map(len, distinct)) > limit:
                raise _long_word_error(index, f"{limit} characters")
            tokens = self._tokenizer.encode_plain(distinct, self.max_length)
            ids = {word: found.ids for word, found in zip(distinct, tokens, strict=True)}
            yield from ((ids[word], start, stop) for word, start, stop in part)

    def _divide(
        self, index: int, words: list[_Word], characters: int, before: TokenIds, labels: TokenIds
    ) -> TextWindows:
        """Divide the words of a text into windows, and put the ids of the labels in front of each.

        `characters` is the length of the text. Raises `InvalidRequestError` for a word that is too
        long for windows.
        """
        if not words:
            return TextWindows(TokenSpans(NO_IDS, NO_IDS, NO_IDS), [], [])
        parts, firsts, lasts = zip(*words, strict=True)
        ids, lengths = np.concatenate(parts), np.array(list(map(len, parts)))
        stops = np.cumsum(lengths)
        starts, size = stops - lengths, self.max_length - len(before)
        if len(ids) > size and lengths.max() > (longest := size // _WORDS_PER_WINDOW):
            raise _long_word_error(index, f"{longest} tokens")
        windows, sequences = [], list[TokenIds]()
        for tokens in divide(len(ids), size):
            first = int(np.searchsorted(starts, tokens.start))
            last = int(np.searchsorted(stops, tokens.stop, side="right"))
            sequence = np.concatenate((before, ids[starts[first] : stops[last - 1]]))
            # A word without tokens has the state of the next token.
            places = starts[first:last] - starts[first] + len(before)
            places = np.minimum(places, len(sequence) - 1)
            windows.append(slice(first, last))
            sequences.append(ArrayTokens.of(sequence, {"words": places, "labels": labels}))
        # The full stop is no part of the text.
        firsts, lasts = (np.minimum(np.array(places), characters) for places in (firsts, lasts))
        ids = ids[np.minimum(starts, len(ids) - 1)]
        return TextWindows(TokenSpans(ids, firsts, lasts), windows, sequences)

    def _score(
        self, states: torch.Tensor, places: list[slice], windows: list[TokenIds]
    ) -> list[torch.Tensor]:
        """Return the scores of each window, `[words x labels, widths]`."""
        model, states = self._model, states.float()
        words, labels = [], []
        for place, ids in zip(places, windows, strict=True):
            # Sequences that measure a forward have no labels.
            arrays = getattr(ids, "arrays", None) or _WITHOUT_LABELS
            words.append(states[place][arrays["words"]])
            labels.append(states[place][arrays["labels"]])
        # The first state is the task's, and predicts how many groups of spans there are: of
        # entities one or none.
        counts = model.count_pred(torch.stack([of_text[0] for of_text in labels])).argmax(-1)
        queries = [
            model.count_embed(of_text[1:], max(1, count))[0]
            for of_text, count in zip(labels, counts.tolist(), strict=True)
        ]
        logits = model.compute_span_scores_batched(words, queries)
        return [
            torch.where(count > 0, of_text.sigmoid(), _NO_SPAN).transpose(0, 1).flatten(0, 1)
            for of_text, count in zip(logits, counts, strict=True)
        ]

    def find_spans(
        self, text: str, read: TextWindows, results: Sequence[FloatArray], request: ExtractRequest
    ) -> Iterator[Span]:
        """Implement `smart_embedder.interface.Extractor`."""
        if not results:
            return
        labels, found = dict.fromkeys(request.labels or ()), []
        shape = (-1, len(labels), self._widths)
        scores = keep_middles(read.windows, [rows.reshape(shape) for rows in results])
        starts, stops = read.spans.starts, read.spans.stops
        for index, label in enumerate(labels):
            for first, last, score in choose_spans(scores[:, index], request.threshold or 0.0):
                start, stop = int(starts[first]), int(stops[last])
                if start < stop:
                    found.append(Span(text[start:stop], start, stop, label, score))
        yield from sorted(found, key=lambda span: (span.start, span.end))


def choose_spans(scores: FloatArray, threshold: float) -> Iterator[tuple[int, int, float]]:
    """Yield the first and last word and the score of spans without overlap, the best first.

    `scores` `[words, widths]` are those of one label.
    """
    first, width = np.nonzero(scores >= np.float32(threshold))
    values = scores[first, width]
    taken = bytearray(len(scores))
    for number, place in enumerate(np.argsort(-values, kind="stable").tolist()):
        if number % _WORDS_AT_ONCE == 0:
            stop_if_given_up()
        start, stop = int(first[place]), int(first[place] + width[place]) + 1
        if stop <= len(scores) and not any(taken[start:stop]):
            taken[start:stop] = b"\1" * (stop - start)
            yield start, stop - 1, float(values[place])


def _long_word_error(index: int, limit: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the text at index {index} has a word of more than {limit}, the most that are read of one "
        "here: send it in parts"
    )


def _load_model(folder: Path) -> Any:
    """Make the package's model of a folder, in float32, with the tensors that are read here."""
    try:
        from gliner2.configuration import ExtractorConfig  # noqa: PLC0415
        from gliner2.inference.engine import SpanExtractor  # noqa: PLC0415
        from gliner2.models.base import load_extractor_tokenizer  # noqa: PLC0415
        from gliner2.models.loading import reconcile_encoder_embeddings  # noqa: PLC0415
    except ImportError as error:
        raise StartupError(
            f"the model in {folder} needs the package gliner2: pip install '.[gliner2]'"
        ) from error
    # The package would log words of texts.
    logging.getLogger("gliner2").setLevel(logging.ERROR)
    weights = Weights.read(folder)
    weights.require_numbers()
    model = SpanExtractor(
        ExtractorConfig.from_pretrained(folder, local_files_only=True),
        encoder_config=AutoConfig.from_pretrained(
            folder / "encoder_config", local_files_only=True, trust_remote_code=False
        ),
        tokenizer=load_extractor_tokenizer(str(folder)),
        use_flashdeberta=False,
    )
    tensors = {
        name: replace(tensor, hashed_as=name).read(tensor.dtype)
        for name, tensor in weights.tensors.items()
    }
    reconcile_encoder_embeddings(model, tensors)
    model.load_state_dict(tensors)
    return model
