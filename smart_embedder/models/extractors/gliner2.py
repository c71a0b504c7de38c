"""GLiNER2: a model that reads the labels of a request before a text, and scores spans of words.

The package `gliner2` makes the inputs, and its modules compute the scores behind the encoder. This
service computes the encoder as any other, and chooses spans as `extract_entities` of the package.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from smart_embedder.errors import InferenceError, InvalidRequestError, StartupError
from smart_embedder.hardware.transfer import DeviceRows, not_finite_error, start_copies
from smart_embedder.interrupts import stop_if_given_up
from smart_embedder.kernels.target import Target
from smart_embedder.models.extractors.token_classifier import divide, join_spans, keep_middles
from smart_embedder.models.families.auto_model import load_by_transformers
from smart_embedder.models.families.module_loading import add_preemption_points
from smart_embedder.models.files.config import read_config, read_optional
from smart_embedder.models.files.record import current_record
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.runner import DeviceModel, OutputSpec
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import ExtractRequest, Outputs
from smart_embedder.results import FloatArray, Span
from smart_embedder.tokens import ArrayTokens, TextWindows, TokenIds, TokenSpans
from smart_embedder.vector_space import SCORE

_MAX_LABELS, _MAX_LABEL_CHARACTERS = 200, 200
# The package's expression for words takes quadratic time for a run of these characters, and linear
# memory for a long word.
_RUN = re.compile(r"[A-Za-z0-9._%+-]+", re.IGNORECASE)
_MAX_RUN, _MAX_WORD = 512, 8192
# The share of a window that one word may have, so that neighbours overlap by an eighth.
_WORDS_PER_WINDOW = 8
# The bytes of a character in the package's lists, of a word, and of a score: of the model, joined
# and compared.
_CHARACTER_BYTES, _WORD_BYTES, _SCORE_BYTES = 128, 512, 4 * 4
# Words of few characters whose tokens are kept.
_CACHED_WORDS, _CACHED_CHARACTERS = 2**14, 32
# The words between two looks at the memory of a request.
_WORDS_AT_ONCE = 4096
# In place of scores where the model predicts no span: below any threshold.
_NO_SPAN = -1.0


class Gliner2Extractor(DeviceModel[FloatArray]):
    """Implements `smart_embedder.interface.Extractor`; a result is `[words, labels, widths]`.

    The number at `[i, j, k]` is the score of label `j` for the `k + 1` words from word `i` on.
    """

    default_threshold = 0.5
    labels: tuple[str, ...] = ()

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load the model; raises `StartupError` if it, or the package, cannot be used."""
        config = _check_folder(folder)

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
        tokenize = self._processor.tokenizer.tokenize
        cached = lru_cache(_CACHED_WORDS)(tokenize)
        # The package's cache is bounded in words, but not in bytes.
        self._processor._tokenize_cached = lambda word: (  # noqa: SLF001
            cached if len(word) <= _CACHED_CHARACTERS else tokenize
        )(word)
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
        if len(request.labels) > _MAX_LABELS:
            raise InvalidRequestError(
                f"the option labels has {len(request.labels)} labels, and {self.name} reads at "
                f"most {_MAX_LABELS}: send several requests"
            )
        for index, label in enumerate(request.labels):
            if len(label) > _MAX_LABEL_CHARACTERS or not label.strip():
                raise InvalidRequestError(
                    f"the label at index {index} has {len(label)} characters: it must have from 1 "
                    f"to {_MAX_LABEL_CHARACTERS} that are not all spaces"
                )
            if any(token in label for token in self._processor.SPECIAL_TOKENS):
                raise InvalidRequestError(
                    f"the label at index {index} has a token that {self.name} reads as the border "
                    f"of labels ({', '.join(self._processor.SPECIAL_TOKENS)}): leave it out"
                )

    def token_bytes(self, request: ExtractRequest) -> int:
        """Implement `smart_embedder.interface.Extractor`."""
        return _WORD_BYTES + _SCORE_BYTES * self._widths * len(request.labels or ())

    def tokenize_windows(
        self, request: ExtractRequest, check: Callable[[int], None]
    ) -> list[TextWindows]:
        """Implement `smart_embedder.interface.Extractor`."""
        schema = {"entities": dict.fromkeys(request.labels or (), "")}
        tokenized, count, word_bytes = list[TextWindows](), 0, self.token_bytes(request)
        for index, text in enumerate(request.texts):
            if not text.strip():
                tokenized.append(TextWindows(join_spans([]), [], []))
                continue
            check(count + _CHARACTER_BYTES * len(text) // word_bytes)
            for words in self._count_words(index, text):
                check(count + words)
            record = self._processor.transform_record(text, schema)
            tokenized.append(self._divide(index, record, len(text)))
            count += len(tokenized[-1].spans.ids)
            check(count)
        return tokenized

    def _count_words(self, index: int, text: str) -> Iterator[int]:
        """Yield growing numbers of words; raises `InvalidRequestError` for one too long."""
        for run in _RUN.finditer(text):
            if run.end() - run.start() > _MAX_RUN:
                raise _long_word_error(index, run.end() - run.start(), _MAX_RUN)
        for number, (_, start, stop) in enumerate(self._processor.word_splitter(text)):
            if stop - start > _MAX_WORD:
                raise _long_word_error(index, stop - start, _MAX_WORD)
            if number % _WORDS_AT_ONCE == 0:
                stop_if_given_up()
                yield number

    def _divide(self, index: int, record: Any, characters: int) -> TextWindows:
        """Divide a text into windows of words, and put the labels in front of each.

        `characters` is the length of the text. Raises `InvalidRequestError` if the labels, or a
        word, leave no room for that.
        """
        ids = np.array(record.input_ids, np.int64)
        starts = np.array(record.text_word_first_positions, np.int64)
        stops, before = np.append(starts[1:], len(ids)), int(starts[0])
        size = self.max_length - before
        if size < self.max_length // 2:
            raise InvalidRequestError(
                f"the labels take {before} tokens, and may take half of the {self.max_length} that "
                f"{self.name} reads at once: send fewer or shorter ones"
            )
        longest = int((stops - starts).max())
        if len(ids) > self.max_length and longest > size // _WORDS_PER_WINDOW:
            raise InvalidRequestError(
                f"the text at index {index} has a word of {longest} tokens, and {self.name} reads "
                f"at most {size // _WORDS_PER_WINDOW} in a text that is longer than "
                f"{self.max_length} tokens: send it in parts"
            )
        windows, sequences = [], list[TokenIds]()
        for tokens in divide(len(ids) - before, size):
            first = int(np.searchsorted(starts, before + tokens.start))
            last = int(np.searchsorted(stops, before + tokens.stop, side="right"))
            words = starts[first:last] - starts[first] + before
            labels = np.array(record.schema_special_positions[0], np.int64)
            sequence = np.concatenate((ids[:before], ids[starts[first] : stops[last - 1]]))
            windows.append(slice(first, last))
            sequences.append(ArrayTokens.of(sequence, {"words": words, "labels": labels}))
        # The package ends a text with a full stop, which is no part of it.
        places = (record.start_token_idx, record.end_token_idx)
        firsts, lasts = (np.minimum(np.array(place, np.int64), characters) for place in places)
        return TextWindows(TokenSpans(ids[starts], firsts, lasts), windows, sequences)

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[FloatArray | InferenceError]]:
        """Implement `DeviceModel`."""
        del outputs
        packed = self._backbone.pack(sequences)
        states = self._backbone.forward(packed)[: packed.real_tokens].float()
        words, labels = list[torch.Tensor](), list[torch.Tensor]()
        for ids, row in zip(sequences, packed.unpack_order, strict=True):
            of_text = states[packed.offsets[row] : packed.offsets[row + 1]]
            # Sequences that measure a forward have no labels.
            arrays = getattr(ids, "arrays", None) or {
                "labels": np.zeros(2, np.int64),
                "words": np.arange(len(ids)),
            }
            words.append(of_text[torch.from_numpy(arrays["words"]).to(of_text.device)])
            labels.append(of_text[torch.from_numpy(arrays["labels"]).to(of_text.device)])
        scores = self._score(words, labels)
        copies = start_copies([DeviceRows.of(torch.cat(scores))], packed.tokens)
        borders = np.cumsum([len(rows) for rows in scores])[:-1]

        def collect() -> list[FloatArray | InferenceError]:
            (host,) = copies()
            results = list[FloatArray | InferenceError]()
            for rows, finite, of_text in zip(
                np.split(host.values, borders), np.split(host.finite, borders), words, strict=True
            ):
                shape = (len(of_text), -1, self._widths)
                results.append(rows.reshape(shape) if finite.all() else not_finite_error())
            return results

        return collect

    def _score(self, words: list[torch.Tensor], labels: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the scores of each text, `[words x labels, widths]`.

        `labels` are the states of the task, which predicts how many groups of spans there are, and
        of each label. Of entities there is one group or none.
        """
        model = self._model
        counts = model.count_pred(torch.stack([states[0] for states in labels])).argmax(-1)
        queries = [
            model.count_embed(states[1:], max(1, count))[0]
            for states, count in zip(labels, counts.tolist(), strict=True)
        ]
        logits = model.compute_span_scores_batched(words, queries)
        scores = []
        for of_text, count in zip(logits, counts, strict=True):
            score = torch.where(count > 0, of_text.sigmoid(), _NO_SPAN)
            scores.append(score.transpose(0, 1).reshape(-1, self._widths))
        return scores

    def find_spans(
        self,
        text: str,
        windows: TextWindows,
        results: Sequence[FloatArray],
        request: ExtractRequest,
        threshold: float,
    ) -> Iterator[Span]:
        """Implement `smart_embedder.interface.Extractor`."""
        if not results:
            return
        scores = np.concatenate(keep_middles(windows.windows, results))
        starts, stops = windows.spans.starts, windows.spans.stops
        found = []
        for index, label in enumerate(dict.fromkeys(request.labels or ())):
            for first, last, score in choose_spans(scores[:, index], threshold):
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


def _long_word_error(index: int, characters: int, limit: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"the text at index {index} has a word of {characters} characters, and at most {limit} are "
        "read: send it in parts"
    )


def _check_folder(folder: Path) -> dict[str, Any]:
    """Return the configuration; raises `StartupError` for a model that cannot be computed."""
    config = read_config(folder)
    for file in ("config.json", "encoder_config/config.json", "tokenizer_config.json"):
        has_code = "auto_map" in read_optional(folder / file)
        if record := current_record():  # The package reads all fields.
            record.read_all_fields(folder / file, ())
        if has_code:
            raise StartupError(
                f"the model in {folder} names code of its own (auto_map in {file}), and code of a "
                "checkpoint is never run"
            )
    architecture, pooling = config.get("architecture", "span"), config.get("token_pooling", "first")
    if (architecture, pooling) != ("span", "first"):
        raise StartupError(
            f"the model in {folder} has the architecture {architecture} and the token_pooling "
            f"{pooling}, and of GLiNER2 only span and first are computed"
        )
    return config


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
