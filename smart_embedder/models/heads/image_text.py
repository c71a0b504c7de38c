"""Texts and pictures in one space: dense vectors, as of CLIP and SigLIP, and those of pages.

ColPali's kind of models has a vector for each token of a query and each patch of a page's picture.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoTokenizer

from smart_embedder.errors import InferenceError, InvalidRequestError, StartupError, one_line
from smart_embedder.hardware.transfer import DeviceRows, not_finite_error, start_copies
from smart_embedder.kernels.packed_batch import UNATTENDED
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    NO_OVERRIDES,
    SentenceOverrides,
    TextOptions,
    read_config,
    transformer_folder,
)
from smart_embedder.models.heads.dense import DenseEmbedder
from smart_embedder.models.heads.embedder import HeadsEmbedder, SequenceHead
from smart_embedder.models.images import (
    Arrays,
    ImageReader,
    MessageReader,
    PageReader,
    make_probe,
)
from smart_embedder.models.runner import OutputSpec
from smart_embedder.models.tokenizer import NO_IDS
from smart_embedder.requests import (
    CUT_AT_END,
    InputType,
    Outputs,
    TruncationOptions,
)
from smart_embedder.results import TextEmbedding
from smart_embedder.tokens import ImageTokens, TokenIds, TokenizedText

# Families whose texts are filled up to the tokenizer's limit, as in training.
_FILLED_TYPES = {"siglip", "siglip2"}
_PROBE_TEXT, _PROBE_PROMPT = "A text", "Prompt: "
# The most bytes of pictures that are copied into one array.
_STACKED_BYTES = 2**23


class ImageEmbedder(HeadsEmbedder):
    """Reads pictures beside texts, and computes them apart; one kind of vectors.

    Subclasses set `_images` and the methods for pictures.
    """

    reads_images = True
    _images: ImageReader

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
        tokenized = self._tokenize_texts(written, prompt, truncation, input_type)
        if len(written) == len(texts):
            return tokenized
        read, held, next_text = list[TokenizedText](), 0, iter(tokenized)
        for index, text in enumerate(texts):
            if isinstance(text, str):
                read.append(next(next_text))
                continue
            try:
                arrays = self._images.read(text, held, prompt)
                tokens = ImageTokens.of(self._find_image_ids(arrays), arrays)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"the input at index {index}: {error}") from error
            held += tokens.array_bytes
            read.append(TokenizedText(tokens, len(tokens)))
        return read

    def _encode_images(self, arrays: Arrays) -> tuple[Tensor, int]:
        """Compute the vectors of pictures, and return the tokens of each, too."""
        vectors, tokens = self._backbone.encode_images(arrays)
        return vectors, tokens

    @torch.inference_mode()
    def _try_picture(self, folder: Path) -> int:
        """Encode a picture, and return the number of its tokens.

        Raises `StartupError` if the image processor in the folder does not fit the model.
        """
        try:
            _, tokens = self._encode_images(self._images.read(make_probe()))
        except Exception as error:
            raise StartupError(
                f"the model in {folder} cannot read a picture as its image processor makes it: "
                f"{one_line(error):.300}"
            ) from error
        return tokens

    def _tokenize_texts(
        self,
        texts: list[str],
        prompt: str,
        truncation: TruncationOptions,
        input_type: InputType | None,
    ) -> list[TokenizedText]:
        """Tokenize texts as `tokenize` does."""
        return super().tokenize(texts, prompt, truncation, input_type)

    def _find_image_ids(self, arrays: Arrays) -> TokenIds:
        """Return the token ids of a picture, or as many zeros.

        Raises `InvalidRequestError` for more ids than the model reads.
        """
        ids: TokenIds = np.ascontiguousarray(arrays["input_ids"][0])
        if len(ids) > self.max_length:
            raise InvalidRequestError(
                f"the picture has {len(ids)} tokens, and {self.name} reads at most "
                f"{self.max_length}: send a smaller one"
            )
        return ids

    def _embed_images(self, images: Sequence[ImageTokens]) -> list[Tensor]:
        """Compute the vectors of each picture, `[rows, width]` float32.

        Pictures with token ids have many tokens, so they are computed one by one.
        """
        return [self._encode_images(dict(ids.arrays))[0].float() for ids in images]

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`."""
        images = [ids for ids in sequences if isinstance(ids, ImageTokens)]
        if not images:
            return super().launch(sequences, outputs)
        texts = [ids for ids in sequences if not isinstance(ids, ImageTokens)]
        collect_texts = super().launch(texts, [self.kinds] * len(texts)) if texts else list
        tokens = sum(map(len, images))
        self._backbone.set_threads(tokens)
        vectors = self._embed_images(images)
        borders = np.cumsum(list(map(len, vectors)))[:-1]
        copies = start_copies([DeviceRows.of(torch.cat(vectors))], tokens)

        def collect() -> list[TextEmbedding | InferenceError]:
            (host,), of_texts = copies(), iter(collect_texts())
            kind = "dense" if self.kinds.dense else "colbert"
            rows = self._to_vectors(kind, list(images), np.split(host.values, borders))
            of_images = (
                TextEmbedding(**{kind: row}) if is_finite.all() else not_finite_error()
                for row, is_finite in zip(rows, np.split(host.finite, borders), strict=True)
            )
            return [
                next(of_images if isinstance(ids, ImageTokens) else of_texts) for ids in sequences
            ]

        return collect


class ImageTextEmbedder(ImageEmbedder, DenseEmbedder):
    """Implements `smart_embedder.interface.Embedder` for dense vectors of texts and pictures."""

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
        transformer = transformer_folder(folder)
        self._images = ImageReader(transformer)
        self._image_tokens = self._try_picture(transformer)
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
            tokenizer = _load_tokenizer(folder)
            lowers = tokenizer("A")["input_ids"] == tokenizer("a")["input_ids"]
            options = replace(options, lower_case=options.lower_case or lowers)
        return options

    def _find_filling(self, folder: Path) -> TokenIds:
        """Return the ids that fill up an empty text, as transformers' tokenizer does.

        Raises `StartupError` if that tokenizer reads texts otherwise.
        """
        tokenizer = _load_tokenizer(folder)
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

    def _tokenize_texts(
        self,
        texts: list[str],
        prompt: str,
        truncation: TruncationOptions,
        input_type: InputType | None,
    ) -> list[TokenizedText]:
        """Implement `ImageEmbedder`: fill up texts to the tokenizer's limit, where it must be."""
        tokenized = super()._tokenize_texts(texts, prompt, truncation, input_type)
        return [*map(self._fill, tokenized)] if len(self._filling) else tokenized

    def _fill(self, text: TokenizedText) -> TokenizedText:
        missing = self._filling[len(text.ids) :]
        ids = np.concatenate((text.ids, missing))
        return TokenizedText(ids, text.original_tokens + len(missing), text.exact)

    def _find_image_ids(self, arrays: Arrays) -> TokenIds:
        """Implement `ImageEmbedder`."""
        del arrays
        return np.zeros(self._image_tokens, np.int64)

    def _embed_images(self, images: Sequence[ImageTokens]) -> list[Tensor]:
        """Implement `ImageEmbedder`: a few pictures at a time."""
        vectors = torch.cat([self._encode_images(arrays)[0] for arrays in _stack(images)]).float()
        for step in self._steps:
            vectors = step(vectors)
        return [vectors[index : index + 1] for index in range(len(vectors))]


class MessageEmbedder(ImageEmbedder, DenseEmbedder):
    """Implements `Embedder` for dense vectors of a language model that reads texts and pictures.

    As in sentence-transformers, a picture is a message of a user, behind a prompt as the system's.
    """

    reads_image_prompts = True
    _dense_head: SequenceHead

    def __init__(self, name: str, folder: Path, *options: Any) -> None:
        """Load the model, with the options of `DenseEmbedder`; raises `StartupError`."""
        super().__init__(name, folder, *options)
        transformer = transformer_folder(folder)
        variables = TextOptions.read(transformer).template_options
        self._images = messages = MessageReader(transformer, variables)
        self._try_picture(transformer)
        for prompt in ("", _PROBE_PROMPT):
            (text,) = self._tokenizer.encode([_PROBE_TEXT], prompt)
            if not np.array_equal(text.ids, messages.read_text(_PROBE_TEXT, prompt)):
                raise StartupError(
                    f"transformers' processor in {transformer} contradicts tokenizer.json"
                )
        spec = self._output_specs["dense"]
        reading = (self._prompts_read, messages.description)
        self._output_specs = {"dense": replace(spec, reading=reading)}

    def _encode_images(self, arrays: Arrays) -> tuple[Tensor, int]:
        """Implement `ImageEmbedder`: compute the vector of one picture, `[1, width]`."""
        packed = self._backbone.pack([arrays["input_ids"][0]])
        states, tokens = self._backbone.encode_images(packed, arrays)
        return self._dense_head(states, packed, np.arange(1)).values, tokens


class PageEmbedder(ImageEmbedder):
    """Implements `Embedder` for ColBERT vectors of queries, and of the pictures of pages."""

    kinds = Outputs(colbert=True)
    pooling = "colbert"
    normalizes = False
    reads_input_type = True
    reads_texts_as_queries = True

    def __init__(
        self,
        name: str,
        folder: Path,
        max_length: int,
        target: Target,
        overrides: SentenceOverrides = NO_OVERRIDES,
    ) -> None:
        """Load the model; raises `StartupError` if the folder cannot be used."""
        settings = ("pooling", "normalize", "query_prompt", "document_prompt")
        overrides.refuse(*settings, for_model=f"{name}, a model of pages")
        texts = TextOptions.read(folder)
        backbone, tokenizer = load_backbone(folder, target, max_length, texts)
        super().__init__(name, backbone, tokenizer, {})
        self._images = pages = PageReader(folder)
        self._try_picture(folder)
        self.colbert_width = backbone.hidden_size
        self._token_heads = {"colbert": lambda states: DeviceRows.of(states.float())}
        self._query_prefix: str = pages.whole.query_prefix
        (expected,) = pages.whole.process_queries([_PROBE_TEXT])["input_ids"].numpy()
        (plain,) = tokenizer.encode_plain([_PROBE_TEXT], len(expected), prompt=self._query_prefix)
        windows = (expected[start : start + plain.kept] for start in range(len(expected)))
        found = (start for start, ids in enumerate(windows) if np.array_equal(ids, plain.ids))
        start = next(found, 0)
        self._before, self._after = expected[:start], expected[start + plain.kept :]
        template = (self._query_prefix, self._before.tolist(), self._after.tolist())
        reading = (pages.description, pages.whole.visual_prompt_prefix, template)
        spec = OutputSpec("token", self.colbert_width, unit_length=True, reading=reading)
        self._output_specs = {"colbert": spec}
        (query,) = self._tokenize_texts([_PROBE_TEXT], "", CUT_AT_END, None)
        if not np.array_equal(query.ids, expected):
            raise StartupError(f"transformers' processor in {folder} contradicts tokenizer.json")

    def _tokenize_texts(
        self,
        texts: list[str],
        prompt: str,
        truncation: TruncationOptions,
        input_type: InputType | None,
    ) -> list[TokenizedText]:
        """Implement `ImageEmbedder`: every text is a query."""
        if input_type == "document" and texts:
            raise InvalidRequestError(
                f"{self.name} reads texts as queries, and documents as pictures of their pages: "
                "send those"
            )
        special = len(self._before) + len(self._after)
        limit = self.max_length - special
        if truncation.max_tokens is not None:
            limit = min(limit, truncation.max_tokens)
        prompt = self._query_prefix + prompt
        return [
            TokenizedText(
                np.concatenate((self._before, text.ids, self._after)),
                text.total + special,
                text.exact,
            )
            for text in self._tokenizer.encode_plain(texts, limit, truncation.side, prompt)
        ]

    def _with_vector(self, ids: TokenIds) -> slice:
        del ids
        return slice(None)


def _load_tokenizer(folder: Path) -> Any:
    """Load transformers' tokenizer; raises `StartupError` if it cannot be loaded."""
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise StartupError(
            f"transformers cannot load the tokenizer in {folder}: {one_line(error):.300}"
        ) from error


def _stack(images: Sequence[ImageTokens]) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the arrays of a few pictures at a time, joined along the first dimension."""
    count = max(1, _STACKED_BYTES // images[0].array_bytes)
    for start in range(0, len(images), count):
        few = [ids.arrays for ids in images[start : start + count]]
        yield {name: np.concatenate([arrays[name] for arrays in few]) for name in few[0]}
