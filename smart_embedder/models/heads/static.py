"""Static embeddings: a table has a vector for each token, and a text's vector is their mean.

These are `StaticEmbedding` of sentence-transformers, and folders of model2vec, whose unknown tokens
have no part in the mean.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from smart_embedder.errors import StartupError
from smart_embedder.kernels.packed_batch import PackedBatch, PositionScheme
from smart_embedder.kernels.target import ATTENTION, Target
from smart_embedder.models.families.backbone import Backbone, Transformer
from smart_embedder.models.files.config import (
    SentenceOverrides,
    read_modules,
    read_optional,
    read_transformer_config,
    transformer_folder,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.dense import DenseEmbedder, set_normalize
from smart_embedder.models.heads.pooling import SentenceConfig
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import CUT_AT_END, TruncationOptions
from smart_embedder.tokens import SpecialToken, TokenizedText

_MODEL2VEC = "model2vec"
# The names of the table: in sentence-transformers, and in model2vec.
_TABLES = ("embedding.weight", "embeddings")
# The limit of model2vec for a folder that states none.
_MAX_LENGTH = 512


def is_static(folder: Path) -> bool:
    """Return whether the folder holds a static embedding."""
    modules = read_modules(folder)
    if not modules:
        return read_transformer_config(folder).get("model_type") == _MODEL2VEC
    return modules[0].kind == "StaticEmbedding"


class StaticTable(Transformer):
    """Maps each token to its row of `table` `[rows, width]`; an id behind the last, to zeros.

    Row `mapping[id]` is that of a token, if there is a `mapping`; it is multiplied by
    `weights[id]`, if there are `weights`. Attention is not computed.
    """

    capturable = False

    def __init__(self, table: Tensor, mapping: Tensor | None, weights: Tensor | None) -> None:
        self._table = table
        self._mapping = mapping
        self._weights = weights
        self.tokens = len(table if mapping is None else mapping)

    @classmethod
    def read(cls, folder: Path, device: torch.device) -> Self:
        """Read the tensors of a folder; raises `StartupError` if they cannot be used."""
        weights = Weights.read(folder).to(device, torch.float32)
        name = next((name for name in _TABLES if name in weights), _TABLES[0])
        table = weights.get(name, None, None)
        mapping = None
        if "mapping" in weights:
            mapping = weights.integers("mapping").to(device)
            if len(mapping) and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
                raise StartupError(f"the checkpoint in {folder} maps tokens to missing rows")
        scale = weights.get("weights", None) if "weights" in weights else None
        found = cls(table, mapping, scale)
        if scale is not None and len(scale) != found.tokens:
            raise StartupError(
                f"the checkpoint in {folder} has {len(scale)} weights for {found.tokens} tokens"
            )
        return found

    @property
    def width(self) -> int:
        """The width of the vectors."""
        return self._table.shape[1]

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`."""
        ids = packed.input_ids[0] if rows is None else packed.input_ids[0].index_select(0, rows)
        is_token = ids < self.tokens
        ids = ids.where(is_token, 0)
        scale = is_token.float() if self._weights is None else self._weights[ids] * is_token
        found = ids if self._mapping is None else self._mapping[ids]
        return functional.embedding(found, self._table) * scale[:, None]

    def without_unattended(self) -> Self:
        """Implement `Transformer`."""
        return self


class StaticTokenizer(TextTokenizer):
    """Tokenizes texts without special tokens, and leaves out the token `unknown`, if it is set.

    A text without any token is read as the id `nothing`.
    """

    nothing = 0
    unknown: int | None = None

    @property
    def special_tokens(self) -> tuple[list[SpecialToken], list[SpecialToken]]:
        """No tokens are added to a text."""
        return [], []

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token in `tokenizer.json`."""
        model = json.loads(self._tokenizer.to_str())["model"]
        if "unk_id" in model:  # Of Unigram.
            return model["unk_id"]  # type: ignore[no-any-return]
        token = model.get("unk_token")
        return None if token is None else self.token_id(token)

    def encode(
        self, texts: list[str], prompt: str = "", truncation: TruncationOptions = CUT_AT_END
    ) -> list[TokenizedText]:
        """Tokenize each text after `prompt`, to at most the model's limit."""
        limit = truncation.lower(self.max_length)
        tokenized: list[TokenizedText] = []
        for text in self.encode_plain(texts, limit, truncation.side, prompt):
            ids = text.ids if self.unknown is None else text.ids[text.ids != self.unknown]
            total = text.total - (len(text.ids) - len(ids))
            if not len(ids):
                ids, total = np.array([self.nothing], np.int64), total + 1
            tokenized.append(TokenizedText(ids, total, text.exact))
        return tokenized


class StaticEmbedder(DenseEmbedder):
    """Implements `smart_embedder.interface.Embedder` for static embeddings, in float32."""

    def __init__(
        self,
        name: str,
        folder: Path,
        max_length: int,
        target: Target,
        overrides: SentenceOverrides,
    ) -> None:
        """Load the table; raises `StartupError` if the folder cannot be used."""
        overrides.refuse("pooling", for_model=f"{name}, whose vectors are means of a table's rows")
        inner = transformer_folder(folder)
        options = read_optional(inner / "config.json")
        is_model2vec = options.get("model_type") == _MODEL2VEC
        if is_model2vec:
            max_length = min(max_length, options.get("max_length", _MAX_LENGTH) or max_length)
        target = _plain_target(target)
        table = StaticTable.read(inner, target.device)
        tokenizer = StaticTokenizer.from_folder(inner, max_length)
        if tokenizer.vocabulary_size > table.tokens:
            raise StartupError(
                f"the tokenizer in {inner} has {tokenizer.vocabulary_size} tokens, and the table "
                f"only {table.tokens}: they are not of one model"
            )
        tokenizer.nothing = table.tokens
        tokenizer.unknown = tokenizer.unknown_id if is_model2vec else None
        backbone = Backbone(
            table,
            target,
            hidden_size=table.width,
            max_length=max_length,
            parameters=table.width,
            positions=PositionScheme(),
            configuration=("static", tokenizer.unknown),
        )
        config = replace(SentenceConfig.read(folder), poolings=("mean",))
        normalizes = overrides.normalize
        if normalizes is None and is_model2vec:
            normalizes = bool(options.get("normalize", False))
        if normalizes is not None:
            config = set_normalize(config, enabled=normalizes)
        self._assemble(name, config, backbone, tokenizer)


def _plain_target(target: Target) -> Target:
    """Return the target in float32, without the paths of layers, which a table does not have."""
    if target.float8:
        raise StartupError("DTYPE=float8 is not for static embeddings; set DTYPE to auto")
    return Target(
        target.device,
        torch.float32,
        target.backend,
        cpu_threads=target.cpu_threads,
        paths={ATTENTION: "none"},
    )
