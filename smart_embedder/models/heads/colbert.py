"""ColBERT: a vector for each token, for late interaction between queries and documents.

Source: "ColBERTv2" (Santhanam et al. 2022), as PyLate and sentence-transformers compute it.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from smart_embedder.errors import StartupError
from smart_embedder.kernels.packed_batch import UNATTENDED, WITHOUT_VECTOR
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    Module,
    TextOptions,
    read_config,
    read_modules,
    read_optional,
    read_prompts,
    read_text_config,
    require_known_modules,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.embedder import HeadsEmbedder, token_vectors
from smart_embedder.models.heads.pooling import load_token_projection, require_vector, steps_of
from smart_embedder.models.runner import Made
from smart_embedder.models.tokenizer import NO_IDS, TextTokenizer
from smart_embedder.requests import CUT_AT_END, InputType, Outputs, TruncationOptions
from smart_embedder.tokens import TokenIds, TokenizedText

_LONGEST = 2**31
# Those of PyLate, for what its configuration leaves out.
_QUERY_LENGTH, _DOCUMENT_LENGTH = 32, 180


@dataclass(frozen=True, slots=True)
class Expansion:
    """Queries are filled up to `length` tokens with `token`, which is `attended` to or not."""

    length: int
    attended: bool
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How texts of one type are read: behind a `marker` token and a `prompt`, cut to `length`."""

    marker: str = ""
    prompt: str = ""
    length: int | None = None


@dataclass(frozen=True, slots=True)
class ColbertConfig:
    """How queries and documents are read.

    Tokens of documents that are in `skipped` get no vector. With `skips_unknown`, as in PyLate, a
    word in `skipped` that is no token stands for the unknown token.
    """

    query: Reading
    document: Reading
    expansion: Expansion | None
    skipped: Sequence[str]
    skips_unknown: bool


def is_colbert(folder: Path) -> bool:
    """Whether the folder's model makes a vector of each token, and none of a whole text."""
    modules = read_modules(folder)
    kinds = {module.kind for module in modules}
    if "MultiVectorMask" in kinds:
        return True
    if "Dense" in kinds and "Pooling" not in kinds:
        return True
    return not modules and "HF_ColBERT" in (read_config(folder).get("architectures") or ())


def read_colbert_config(folder: Path) -> ColbertConfig:
    """Read it; raises `StartupError` for options that are not known here."""
    require_known_modules(folder, "Transformer", "Dense", "MultiVectorMask", "Normalize", "Dropout")
    modules = read_modules(folder)
    mask = next((module for module in modules if module.kind == "MultiVectorMask"), None)
    if mask is not None:
        steps = [each.kind for each in modules if each.kind in {"Dense", "Normalize"}]
        if "Normalize" not in steps or "Dense" in steps[steps.index("Normalize") :]:
            raise StartupError(
                f"{folder / 'modules.json'} does not end in Normalize, and vectors of tokens have "
                "unit length here"
            )
        for module in modules:
            if module.kind == "Normalize":
                require_vector(module.folder, "token_embeddings")
        return _by_sentence_transformers(folder, mask)
    punctuation = list(string.punctuation)
    if not modules:  # Stanford's.
        config = read_optional(folder / "artifact.metadata")
        names = ("query_maxlen", "doc_maxlen", "query_token_id", "doc_token_id")
        markers, attends = ("[unused0]", "[unused1]"), "attend_to_mask_tokens"
        expands, skipped = True, punctuation if config.get("mask_punctuation", True) else []
    else:  # PyLate's.
        config = read_optional(folder / "config_sentence_transformers.json")
        names = ("query_length", "document_length", "query_prefix", "document_prefix")
        markers, attends = ("[Q] ", "[D] "), "attend_to_expansion_tokens"
        expands = _or_default(config, "do_query_expansion", True)
        skipped = _or_default(config, "skiplist_words", punctuation)
    query_length = _length(config, names[0], _QUERY_LENGTH)
    document_length = _length(config, names[1], _DOCUMENT_LENGTH)
    return ColbertConfig(
        Reading(_or_default(config, names[2], markers[0]), length=query_length),
        Reading(_or_default(config, names[3], markers[1]), length=document_length),
        Expansion(query_length, bool(config.get(attends))) if expands else None,
        skipped,
        skips_unknown=True,
    )


def _by_sentence_transformers(folder: Path, mask: Module) -> ColbertConfig:
    masks = read_optional(mask.folder / "config.json")
    tasks = masks.get("skiplist_tasks")
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    if masks.get("keep_only_token_ids") or "query" in tasks:
        raise StartupError(
            f"{mask.folder} leaves out other tokens than some of documents, which is not done here"
        )
    texts, longest = read_text_config(folder), TextOptions.read(folder, by_type=True).max_length
    prompts = read_optional(folder / "config_sentence_transformers.json").get("prompts") or {}
    documents = (prompts[name] for name in ("document", "passage", "corpus") if name in prompts)
    expansion = _expansion(folder, texts.get("query_expansion"))
    return ColbertConfig(
        query=Reading(
            prompt=prompts.get("query") or "",
            length=expansion.length if expansion else _length(texts, "query_length", 0) or longest,
        ),
        document=Reading(
            prompt=next(documents, None) or "",
            length=_length(texts, "document_length", 0) or longest,
        ),
        expansion=expansion,
        skipped=masks.get("skiplist_words") or [] if "document" in tasks else [],
        skips_unknown=False,
    )


def _expansion(folder: Path, config: Mapping[str, Any] | None) -> Expansion | None:
    if config is None:
        return None
    if config.get("strategy") != "fixed":
        raise StartupError(
            f"{folder} expands queries by the strategy {config.get('strategy')}; known here: fixed"
        )
    return Expansion(
        _length(config, "length", _QUERY_LENGTH), bool(config.get("attend")), config.get("token")
    )


def _length(config: Mapping[str, Any], key: str, default: int) -> int:
    """A number of tokens; raises `StartupError` for any other value."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or not 0 < value < _LONGEST:
        raise StartupError(f"the configuration of ColBERT has no usable {key}: {value!s:.60}")
    return value


def _or_default(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def special_token(folder: Path, name: str) -> str | None:
    """A special token in the tokenizer's configuration, where `name` is such as `mask_token`."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = read_optional(folder / file).get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            return content
    return None


class TextReader:
    """Tokenises queries or documents."""

    def __init__(self, reading: Reading, tokenizer: TextTokenizer) -> None:
        """Raises `StartupError` if the marker is no token, or leaves no room for text."""
        # At most one id, put after the first token.
        self._marker = NO_IDS
        if reading.marker:
            self._marker = np.array([_required(tokenizer, reading.marker, "marker")], np.int64)
        frame = len(self._marker) + sum(map(len, tokenizer.special_tokens))
        length = min(tokenizer.max_length, reading.length or tokenizer.max_length)
        if length <= frame:
            raise StartupError(
                f"a length limit of {length} tokens leaves no room for text beside the {frame} "
                "special tokens of this model"
            )
        self._tokenizer = tokenizer
        self._prompt = reading.prompt
        self._max_tokens = length - frame  # Without special tokens.

    def read(
        self, texts: list[str], prompt: str, truncation: TruncationOptions
    ) -> list[TokenizedText]:
        """Token ids of each text behind its own prompt and `prompt`."""
        most = self._max_tokens
        if truncation.max_tokens is not None:
            most = min(most, truncation.max_tokens)
        options = replace(truncation, max_tokens=most)
        read = self._tokenizer.encode(texts, self._prompt + prompt, options)
        if not len(self._marker):
            return read
        return [
            TokenizedText(
                np.concatenate((text.ids[:1], self._marker, text.ids[1:])),
                text.original_tokens + 1,
                text.exact,
            )
            for text in read
        ]


class ColbertEmbedder(HeadsEmbedder):
    """Implements `smart_embedder.interface.Embedder` for ColBERT vectors alone."""

    kinds = Outputs(colbert=True)
    pooling = "colbert"
    normalizes = False
    reads_input_type = True

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load it; raises `StartupError` for whatever is wrong with the folder."""
        config, weights = read_colbert_config(folder), Weights.read(folder)
        # Its own lengths, of queries and documents, stand in place of the one for every text.
        longest = max(each.length or max_length for each in (config.query, config.document))
        texts = replace(TextOptions.read(folder, by_type=True), max_length=longest)
        backbone, tokenizer = load_backbone(folder, target, max_length, texts, weights=weights)
        # The prompts of sentence-transformers are the markers.
        prompted = config.query.prompt or config.document.prompt
        super().__init__(name, backbone, tokenizer, {} if prompted else read_prompts(folder))
        projection, self.colbert_width = load_token_projection(
            folder, weights, backbone.hidden_size
        )
        steps = steps_of(projection)
        layers = backbone.place_head(projection)
        self._token_heads = {"colbert": partial(token_vectors, layers, backbone)}
        self._query = TextReader(config.query, tokenizer)
        self._document = TextReader(config.document, tokenizer)
        self._filling = _filling(config.expansion, folder, tokenizer)
        skipped = [tokenizer.token_id(word) for word in config.skipped]
        if config.skips_unknown and None in skipped:
            unknown = special_token(folder, "unk_token")
            skipped.append(None if unknown is None else tokenizer.token_id(unknown))
        self._skipped = np.array([each for each in skipped if each is not None], np.int64)
        if config.expansion is not None and not config.expansion.attended:
            backbone.exclude_unattended(config.expansion.length)
        fills, left_out = self._filling[:1].tolist(), self._skipped.tolist()
        reading = (config.query, config.document, config.expansion, fills, left_out)
        self._made = {
            "colbert": Made(
                "token",
                self.colbert_width,
                unit_length=True,
                steps=steps,
                reading=(reading, self._prompts_read),
            )
        }

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
            return [*map(self._fill, queries)] if len(self._filling) else queries
        documents = self._document.read(texts, prompt, truncation)
        return [
            replace(each, ids=each.ids | WITHOUT_VECTOR * np.isin(each.ids, self._skipped))
            for each in documents
        ]

    def _fill(self, query: TokenizedText) -> TokenizedText:
        """The query with as many tokens appended as are missing."""
        missing = self._filling[len(query.ids) :]
        ids = np.concatenate((query.ids, missing))
        return TokenizedText(ids, query.original_tokens + len(missing), query.exact)

    def _with_vector(self, ids: TokenIds) -> slice | npt.NDArray[np.bool_]:
        without = (ids & WITHOUT_VECTOR) != 0
        return ~without if without.any() else slice(None)


def _required(tokenizer: TextTokenizer, token: str, what: str) -> int:
    token_id = tokenizer.token_id(token)
    if token_id is None:
        raise StartupError(f"the vocabulary has not the {what} {token!r} of its configuration")
    return token_id


def _filling(expansion: Expansion | None, folder: Path, tokenizer: TextTokenizer) -> TokenIds:
    """The tokens that queries are filled up with; raises `StartupError` if there are none."""
    if expansion is None:
        return NO_IDS
    side = read_optional(folder / "tokenizer_config.json").get("padding_side")
    if side == "left" if side else tokenizer.pads_left:
        raise StartupError(
            f"the tokenizer in {folder} pads texts on the left, and queries are filled up with "
            "tokens on the right alone here"
        )
    name = expansion.token or special_token(folder, "mask_token")
    name = name or special_token(folder, "eos_token")
    if name is None:
        raise StartupError(f"{folder} expands queries, and names no mask token to do it with")
    token = _required(tokenizer, name, "mask token")
    return np.full(expansion.length, token if expansion.attended else token | UNATTENDED, np.int64)
