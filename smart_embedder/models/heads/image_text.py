"""Dense vectors of texts and pictures in one space, as of CLIP and SigLIP."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer

from smart_embedder.errors import InferenceError, InvalidRequestError, StartupError
from smart_embedder.hardware.transfer import DeviceRows, not_finite_error, start_copies
from smart_embedder.kernels.packed_batch import UNATTENDED
from smart_embedder.kernels.target import Target
from smart_embedder.models.files.config import (
    NO_OVERRIDES,
    SentenceOverrides,
    TextOptions,
    read_config,
    transformer_folder,
)
from smart_embedder.models.heads.dense import DenseEmbedder
from smart_embedder.models.images import ImageReader, make_probe
from smart_embedder.models.tokenizer import NO_IDS
from smart_embedder.requests import (
    CUT_AT_END,
    DENSE,
    InputType,
    Outputs,
    TruncationOptions,
)
from smart_embedder.results import TextEmbedding
from smart_embedder.tokens import ImageTokens, TokenIds, TokenizedText

# Families whose texts are filled up to the tokenizer's limit, as in training.
_FILLED_TYPES = {"siglip", "siglip2"}
_PROBE_TEXT = "A text"
# The most bytes of pictures that are copied into one array.
_STACKED_BYTES = 2**23


class ImageTextEmbedder(DenseEmbedder):
    """Implements `smart_embedder.interface.Embedder` for texts and pictures."""

    reads_images = True

    def __init__(
        self,
        name: str,
        folder: Path,
        max_length: int,
        target: Target,
        overrides: SentenceOverrides = NO_OVERRIDES,
    ) -> None:
        """Load the model; raises `StartupError` if the folder cannot be used."""
        overrides.refuse("pooling", for_model=f"{name}, which projects texts and pictures")
        # The module itself pools: each token has the vector of its text.
        super().__init__(name, folder, max_length, target, replace(overrides, pooling="cls"))
        transformer, encode = transformer_folder(folder), self._backbone.encode_images
        if encode is None:
            raise StartupError(f"{transformer} has no part that reads pictures")
        self._encode_images = encode
        self._images = ImageReader(transformer)
        with torch.inference_mode():
            _, self._image_tokens = encode(self._images.read(make_probe()))
        self._filling = NO_IDS
        if read_config(transformer)["model_type"] in _FILLED_TYPES:
            self._filling = self._find_filling(transformer)
        spec = self._output_specs["dense"]
        reading = (self._prompts_read, self._images.description, self._filling.tolist())
        self._output_specs = {"dense": replace(spec, reading=reading)}

    def _read_text_options(self, folder: Path) -> TextOptions:
        """Read the options; some tokenizers of transformers lower the case by themselves."""
        options = TextOptions.read(folder)
        if read_config(folder)["model_type"] in _FILLED_TYPES:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            lowers = tokenizer("A")["input_ids"] == tokenizer("a")["input_ids"]
            options = replace(options, lower_case=options.lower_case or lowers)
        return options

    def _find_filling(self, folder: Path) -> TokenIds:
        """Return the ids that fill up an empty text, as transformers' tokenizer does.

        Raises `StartupError` if that tokenizer reads texts otherwise.
        """
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        length = min(self._backbone.max_length, tokenizer.model_max_length)
        filled = tokenizer(_PROBE_TEXT, padding="max_length", max_length=length)
        ids = np.array(filled["input_ids"], np.int64)
        is_attended = np.array(filled.get("attention_mask", [1] * length))
        (text,) = self._tokenizer.encode([_PROBE_TEXT])
        if not np.array_equal(ids[: len(text.ids)], text.ids):
            raise StartupError(
                f"transformers' tokenizer in {folder} fills up texts on the left, or contradicts "
                "tokenizer.json, neither of which is supported"
            )
        return np.full(length, ids[-1]) | (0 if is_attended[-1] else UNATTENDED)

    def tokenize(
        self,
        texts: list[Any],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Tokenize each text, and decode and process each picture.

        Raises `InvalidRequestError` for a picture that cannot be used.
        """
        written = [text for text in texts if isinstance(text, str)]
        tokenized = map(self._fill, super().tokenize(written, prompt, truncation, input_type))
        if len(written) == len(texts):
            return list(tokenized)
        read, held = list[TokenizedText](), 0
        for index, text in enumerate(texts):
            if isinstance(text, str):
                read.append(next(tokenized))
                continue
            try:
                arrays = self._images.read(text, held)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"the input at index {index}: {error}") from error
            tokens = ImageTokens.of(np.zeros(self._image_tokens, np.int64), arrays)
            held += tokens.array_bytes
            read.append(TokenizedText(tokens, len(tokens)))
        return read

    def _fill(self, text: TokenizedText) -> TokenizedText:
        """Fill up a text to the tokenizer's limit, if the model reads texts so."""
        missing = self._filling[len(text.ids) :]
        if not len(missing):
            return text
        ids = np.concatenate((text.ids, missing))
        return TokenizedText(ids, text.original_tokens + len(missing), text.exact)

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`: compute pictures apart from texts."""
        images = [ids for ids in sequences if isinstance(ids, ImageTokens)]
        if not images:
            return super().launch(sequences, outputs)
        texts = [ids for ids in sequences if not isinstance(ids, ImageTokens)]
        collect_texts = super().launch(texts, [DENSE] * len(texts)) if texts else list
        tokens = sum(map(len, images))
        self._backbone.set_threads(tokens)
        vectors = torch.cat([self._encode_images(arrays)[0] for arrays in _stack(images)]).float()
        for step in self._steps:
            vectors = step(vectors)
        copies = start_copies([DeviceRows.of(vectors)], tokens)

        def collect() -> list[TextEmbedding | InferenceError]:
            (rows,), of_texts = copies(), iter(collect_texts())
            of_images = (
                TextEmbedding(row) if is_finite else not_finite_error()
                for row, is_finite in zip(rows.values, rows.finite, strict=True)
            )
            return [
                next(of_images if isinstance(ids, ImageTokens) else of_texts) for ids in sequences
            ]

        return collect


def _stack(images: Sequence[ImageTokens]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the arrays of a few pictures at a time, joined along the first dimension."""
    count = max(1, _STACKED_BYTES // images[0].array_bytes)
    for start in range(0, len(images), count):
        few = [ids.arrays for ids in images[start : start + count]]
        yield {name: np.concatenate([arrays[name] for arrays in few]) for name in few[0]}
