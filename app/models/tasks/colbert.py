"""ColBERT: a vector for each token, for late interaction between queries and documents.

Source: "ColBERTv2" (Santhanam et al. 2022), as PyLate and sentence-transformers compute it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import nn

from app.engine.options import CUT_AT_END, InputType, TruncationOptions
from app.engine.types import Outputs, TokenIds, TokenizedText
from app.errors import StartupError
from app.models.backbones.backbone import Backbone
from app.models.backbones.families import load_backbone
from app.models.batch.marks import UNATTENDED, WITHOUT_VECTOR, marked
from app.models.checkpoint.config import read_optional
from app.models.checkpoint.sentence_config import TextOptions, read_prompts
from app.models.checkpoint.weights import Weights
from app.models.target import Target
from app.models.tasks.colbert_config import (
    ColbertConfig,
    Expansion,
    Reading,
    read_colbert_config,
    special_token,
)
from app.models.tasks.heads import token_vectors
from app.models.tasks.heads_embedder import HeadsEmbedder
from app.models.tasks.projection import load_token_projection
from app.models.text.template import NO_IDS, ids_of
from app.models.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class TextReader:
    """Tokenises queries or documents; `marker` holds at most one id, put after the first token.

    `max_tokens` is the limit of a text without special tokens.
    """

    tokenizer: TextTokenizer
    marker: TokenIds
    prompt: str
    max_tokens: int

    @classmethod
    def of(cls, reading: Reading, tokenizer: TextTokenizer) -> "TextReader":
        """Raises `StartupError` if the marker is no token, or leaves no room for text."""
        marker = NO_IDS
        if reading.marker:
            marker = ids_of([_required(tokenizer, reading.marker, "marker")])
        frame = len(marker) + sum(map(len, tokenizer.special_tokens))
        length = min(tokenizer.max_length, reading.length or tokenizer.max_length)
        if length <= frame:
            raise StartupError(
                f"a length limit of {length} tokens leaves no room for text beside the {frame} "
                "special tokens of this model"
            )
        return cls(tokenizer, marker, reading.prompt, length - frame)

    def read(
        self, texts: list[str], prompt: str, truncation: TruncationOptions
    ) -> list[TokenizedText]:
        """Token ids of each text behind its own prompt and `prompt`."""
        most = self.max_tokens
        if truncation.max_tokens is not None:
            most = min(most, truncation.max_tokens)
        options = replace(truncation, max_tokens=most)
        read = self.tokenizer.encode(texts, self.prompt + prompt, options)
        return [self._behind_marker(text) for text in read] if len(self.marker) else read

    def _behind_marker(self, text: TokenizedText) -> TokenizedText:
        ids = np.concatenate((text.ids[:1], self.marker, text.ids[1:]))
        return TokenizedText(ids, text.original_tokens + 1, text.exact)


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Fills queries up to `length` tokens with `token`, which may be marked as unattended."""

    length: int
    token: int

    @classmethod
    def of(cls, expansion: Expansion, folder: Path, tokenizer: TextTokenizer) -> "QueryExpansion":
        """Raises `StartupError` if the vocabulary has no such token, or texts are padded before."""
        if _pads_left(folder, tokenizer):
            raise StartupError(
                f"the tokenizer in {folder} pads texts on the left, and queries are filled up with "
                "tokens on the right alone here"
            )
        name = expansion.token or special_token(folder, "mask_token")
        name = name or special_token(folder, "eos_token")
        if name is None:
            raise StartupError(f"{folder} expands queries, and names no mask token to do it with")
        token = _required(tokenizer, name, "mask token")
        return cls(expansion.length, token if expansion.attended else token | UNATTENDED)

    def fill(self, query: TokenizedText) -> TokenizedText:
        """The query with as many tokens appended as are missing."""
        missing = max(0, self.length - len(query.ids))
        filling = np.full(missing, self.token, np.int64)
        ids = np.concatenate((query.ids, filling))
        return TokenizedText(ids, query.original_tokens + missing, query.exact)


class ColbertEmbedder(HeadsEmbedder):
    """Implements `app.engine.model.Embedder` for ColBERT vectors alone."""

    kinds = Outputs(colbert=True)
    pooling = "colbert"
    normalizes = False
    reads_input_type = True

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        projection: nn.Sequential,
        config: ColbertConfig,
        prompts: Mapping[str, str],
    ) -> None:
        layers = projection.to(backbone.device, backbone.dtype)
        super().__init__(
            name, backbone, tokenizer, prompts,
            token_heads={"colbert": partial(token_vectors, layers, backbone)},
        )  # fmt: skip
        self.colbert_width = int(projection[-1].out_features)  # type: ignore[arg-type]
        self._query = TextReader.of(config.query, tokenizer)
        self._document = TextReader.of(config.document, tokenizer)
        expansion = config.expansion
        self._expansion = expansion and QueryExpansion.of(expansion, folder, tokenizer)
        self._skipped = _skipped(config, folder, tokenizer)
        if expansion is not None and not expansion.attended:
            backbone.leave_out_unattended(expansion.length)

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Token ids of queries, or of documents, the default."""
        if input_type == "query":
            queries = self._query.read(texts, prompt, truncation)
            return [*map(self._expansion.fill, queries)] if self._expansion else queries
        documents = self._document.read(texts, prompt, truncation)
        return [replace(each, ids=self._without_skipped(each.ids)) for each in documents]

    def _without_skipped(self, ids: TokenIds) -> TokenIds:
        return ids | WITHOUT_VECTOR * np.isin(ids, self._skipped)

    def _with_vector(self, ids: TokenIds) -> slice | npt.NDArray[np.bool_]:
        without = marked(ids, WITHOUT_VECTOR)
        return ~without if without.any() else slice(None)


def _pads_left(folder: Path, tokenizer: TextTokenizer) -> bool:
    side = read_optional(folder / "tokenizer_config.json").get("padding_side")
    return side == "left" if side else tokenizer.pads_left


def _required(tokenizer: TextTokenizer, token: str, what: str) -> int:
    token_id = tokenizer.token_id(token)
    if token_id is None:
        raise StartupError(f"the vocabulary has not the {what} {token!r} of its configuration")
    return token_id


def _skipped(config: ColbertConfig, folder: Path, tokenizer: TextTokenizer) -> TokenIds:
    """The tokens of documents that get no vector."""
    ids = [tokenizer.token_id(word) for word in config.skipped]
    if config.skips_unknown and None in ids:
        unknown = special_token(folder, "unk_token")
        ids.append(None if unknown is None else tokenizer.token_id(unknown))
    return ids_of([token_id for token_id in ids if token_id is not None])


def load_colbert_embedder(
    name: str, folder: Path, max_length: int, target: Target
) -> ColbertEmbedder:
    """Load a ColBERT model; raises `StartupError` for whatever is wrong with the folder."""
    config = read_colbert_config(folder)
    weights = Weights.read(folder)
    # Its own lengths, of queries and documents, stand in place of the one for every text.
    longest = max(each.length or max_length for each in (config.query, config.document))
    texts = replace(TextOptions.read(folder, by_type=True), max_length=longest)
    backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
    return ColbertEmbedder(
        name=name,
        folder=folder,
        backbone=backbone,
        tokenizer=tokenizer,
        projection=load_token_projection(folder, weights, backbone.hidden_size),
        config=config,
        # Those of sentence-transformers are the markers.
        prompts={} if config.query.prompt or config.document.prompt else read_prompts(folder),
    )
