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
    transformer_folder,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.embedder import HeadsEmbedder, compute_colbert_vectors
from smart_embedder.models.heads.pooling import (
    describe_layers,
    load_token_projection,
    require_vector,
)
from smart_embedder.models.runner import OutputSpec
from smart_embedder.models.tokenizer import NO_IDS, TextTokenizer
from smart_embedder.requests import CUT_AT_END, InputType, Outputs, TruncationOptions
from smart_embedder.tokens import TokenIds, TokenizedText

_LONGEST = 2**31
# The defaults of PyLate.
_QUERY_LENGTH, _DOCUMENT_LENGTH = 32, 180


# The repr of these two is hashed for the vector space: another name would change its id.
@dataclass(frozen=True, slots=True)
class Expansion:
    """Fills up queries to `length` tokens with `token`; `attended` says if attention sees it."""

    length: int
    attended: bool
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How queries, or documents, are read: behind `marker` and `prompt`, cut to `length` tokens."""

    marker: str = ""
    prompt: str = ""
    length: int | None = None


@dataclass(frozen=True, slots=True)
class ColbertConfig:
    """How queries and documents are read.

    Tokens of documents in `skipped` get no vector. With `skips_unknown`, as in PyLate, a word in
    `skipped` that the vocabulary lacks stands for the unknown token.
    """

    query: Reading
    document: Reading
    expansion: Expansion | None
    skipped: Sequence[str]
    skips_unknown: bool


def is_colbert(folder: Path) -> bool:
    """Return whether the model makes a vector for each token, and none for a whole text."""
    modules = read_modules(folder)
    kinds = {module.kind for module in modules}
    if "MultiVectorMask" in kinds:
        return True
    if "Dense" in kinds and "Pooling" not in kinds:
        return True
    return not modules and "HF_ColBERT" in (read_config(folder).get("architectures") or ())


def read_colbert_config(folder: Path) -> ColbertConfig:
    """Read the configuration; raises `StartupError` for options that are not supported."""
    require_known_modules(folder, "Transformer", "Dense", "MultiVectorMask", "Normalize", "Dropout")
    modules = read_modules(folder)
    mask = next((module for module in modules if module.kind == "MultiVectorMask"), None)
    if mask is not None:
        steps = [module.kind for module in modules if module.kind in {"Dense", "Normalize"}]
        if "Normalize" not in steps or "Dense" in steps[steps.index("Normalize") :]:
            raise StartupError(
                f"{folder / 'modules.json'} does not end in Normalize, and vectors of tokens have "
                "unit length here"
            )
        for module in modules:
            if module.kind == "Normalize":
                require_vector(module.folder, "token_embeddings")
        return _read_sentence_transformers(folder, mask)
    punctuation = list(string.punctuation)
    if not modules:  # Of Stanford's ColBERT.
        config = read_optional(folder / "artifact.metadata")
        names = ("query_maxlen", "doc_maxlen", "query_token_id", "doc_token_id")
        markers, attends = ("[unused0]", "[unused1]"), "attend_to_mask_tokens"
        expands, skipped = True, punctuation if config.get("mask_punctuation", True) else []
    else:  # Of PyLate.
        config = read_optional(folder / "config_sentence_transformers.json")
        names = ("query_length", "document_length", "query_prefix", "document_prefix")
        markers, attends = ("[Q] ", "[D] "), "attend_to_expansion_tokens"
        expands = _get_or_default(config, "do_query_expansion", True)
        skipped = _read_words(config, "skiplist_words", punctuation)
    query_length = _read_length(config, names[0], _QUERY_LENGTH)
    document_length = _read_length(config, names[1], _DOCUMENT_LENGTH)
    return ColbertConfig(
        Reading(_read_marker(config, names[2], markers[0]), length=query_length),
        Reading(_read_marker(config, names[3], markers[1]), length=document_length),
        Expansion(query_length, bool(config.get(attends))) if expands else None,
        skipped,
        skips_unknown=True,
    )


def _read_sentence_transformers(folder: Path, mask: Module) -> ColbertConfig:
    mask_config = read_optional(mask.folder / "config.json")
    tasks = mask_config.get("skiplist_tasks")
    is_one = isinstance(tasks, str)
    tasks = [tasks] if is_one else _read_words(mask_config, "skiplist_tasks", ["document"])
    if mask_config.get("keep_only_token_ids") or "query" in tasks:
        raise StartupError(
            f"{mask.folder} leaves out tokens of queries, or keeps only some tokens "
            "(keep_only_token_ids), which is not supported"
        )
    transformer = transformer_folder(folder)
    texts = read_text_config(transformer)
    longest = TextOptions.read(transformer, by_type=True).max_length
    prompts = read_optional(folder / "config_sentence_transformers.json").get("prompts") or {}
    is_named = isinstance(prompts, dict)
    if not is_named or not all(isinstance(prompt, str | None) for prompt in prompts.values()):
        raise _unusable_value("prompts", prompts)
    documents = (prompts[name] for name in ("document", "passage", "corpus") if name in prompts)
    expansion = _read_expansion(folder, texts.get("query_expansion"))
    query_length = expansion.length if expansion else _read_length(texts, "query_length", 0)
    return ColbertConfig(
        query=Reading(prompt=prompts.get("query") or "", length=query_length or longest),
        document=Reading(
            prompt=next(documents, None) or "",
            length=_read_length(texts, "document_length", 0) or longest,
        ),
        expansion=expansion,
        skipped=_read_words(mask_config, "skiplist_words", []) if "document" in tasks else [],
        skips_unknown=False,
    )


def _read_expansion(folder: Path, config: Any) -> Expansion | None:
    if config is None:
        return None
    if not isinstance(config, dict) or not isinstance(config.get("token"), str | None):
        raise _unusable_value("query_expansion", config)
    if config.get("strategy") != "fixed":
        raise StartupError(
            f"{folder} expands queries by the strategy {config.get('strategy')}; supported: fixed"
        )
    length = _read_length(config, "length", _QUERY_LENGTH)
    return Expansion(length, bool(config.get("attend")), config.get("token"))


def _read_marker(config: Mapping[str, Any], key: str, default: str) -> str:
    """Read a marker of texts; raises `StartupError` for any value but a string."""
    marker = _get_or_default(config, key, default)
    if not isinstance(marker, str):
        raise _unusable_value(key, marker)
    return marker


def _read_words(config: Mapping[str, Any], key: str, default: list[str]) -> list[str]:
    """Read a list of words; raises `StartupError` for any other value."""
    words = _get_or_default(config, key, default)
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _unusable_value(key, words)
    return words


def _read_length(config: Mapping[str, Any], key: str, default: int) -> int:
    """Read a number of tokens; raises `StartupError` for any other value."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not int or not 0 < value < _LONGEST:
        raise _unusable_value(key, value)
    return value


def _unusable_value(key: str, value: Any) -> StartupError:
    return StartupError(f"the configuration of ColBERT has no usable {key}: {value!s:.60}")


def _get_or_default(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    return default if value is None else value


def read_special_token(folder: Path, name: str) -> str | None:
    """Read a special token, such as the `mask_token`, from the tokenizer's configuration."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        value = read_optional(folder / file).get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            return content
    return None


class TextReader:
    """Tokenizes queries or documents."""

    def __init__(self, reading: Reading, tokenizer: TextTokenizer) -> None:
        """Raises `StartupError` if the marker is no token, or leaves no room for text."""
        # At most one id, which is inserted after the first token.
        self._marker = NO_IDS
        if reading.marker:
            marker_id = _require_token(tokenizer, reading.marker, "marker")
            self._marker = np.array([marker_id], np.int64)
        special_count = len(self._marker) + sum(map(len, tokenizer.special_tokens))
        length = min(tokenizer.max_length, reading.length or tokenizer.max_length)
        if length <= special_count:
            raise StartupError(
                f"a length limit of {length} tokens leaves no room for text beside the "
                f"{special_count} special tokens of this model"
            )
        self._tokenizer = tokenizer
        self._prompt = reading.prompt
        self._max_tokens = length - special_count

    def read(
        self, texts: list[str], prompt: str, truncation: TruncationOptions
    ) -> list[TokenizedText]:
        """Tokenize each text behind the prompt of the configuration and `prompt`."""
        options = replace(truncation, max_tokens=truncation.lower(self._max_tokens))
        tokenized = self._tokenizer.encode(texts, self._prompt + prompt, options)
        if not len(self._marker):
            return tokenized
        return [
            TokenizedText(
                np.concatenate((text.ids[:1], self._marker, text.ids[1:])),
                text.original_tokens + 1,
                text.exact,
            )
            for text in tokenized
        ]


class ColbertEmbedder(HeadsEmbedder):
    """Implements `smart_embedder.interface.Embedder` for ColBERT vectors alone."""

    kinds = Outputs(colbert=True)
    pooling = "colbert"
    normalizes = False
    reads_input_type = True

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load the model; raises `StartupError` if the folder cannot be used."""
        config, transformer = read_colbert_config(folder), transformer_folder(folder)
        weights = Weights.read(transformer)
        # The lengths of queries and documents replace the length for every text.
        longest = max(reading.length or max_length for reading in (config.query, config.document))
        texts = replace(TextOptions.read(transformer, by_type=True), max_length=longest)
        backbone, tokenizer = load_backbone(transformer, target, max_length, texts, weights=weights)
        # sentence-transformers has prompts in place of markers: requests cannot choose them.
        has_prompts = config.query.prompt or config.document.prompt
        super().__init__(name, backbone, tokenizer, {} if has_prompts else read_prompts(folder))
        projection, self.colbert_width = load_token_projection(
            folder, weights, backbone.hidden_size
        )
        steps = describe_layers(projection)
        layers = backbone.place_head(projection)
        self._token_heads = {"colbert": partial(compute_colbert_vectors, layers, backbone)}
        self._query = TextReader(config.query, tokenizer)
        self._document = TextReader(config.document, tokenizer)
        self._expansion_ids = _find_expansion_ids(config.expansion, transformer, tokenizer)
        skipped = [tokenizer.token_id(word) for word in config.skipped]
        if config.skips_unknown and None in skipped:
            unknown = read_special_token(transformer, "unk_token")
            skipped.append(None if unknown is None else tokenizer.token_id(unknown))
        self._skipped = np.array([id_ for id_ in skipped if id_ is not None], np.int64)
        if config.expansion is not None and not config.expansion.attended:
            backbone.exclude_unattended(config.expansion.length)
        expansion_id, skipped_ids = self._expansion_ids[:1].tolist(), self._skipped.tolist()
        reading = (config.query, config.document, config.expansion, expansion_id, skipped_ids)
        self._output_specs = {
            "colbert": OutputSpec(
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
        """Tokenize queries, or documents, which are the default."""
        if input_type == "query":
            queries = self._query.read(texts, prompt, truncation)
            return [*map(self._expand, queries)] if len(self._expansion_ids) else queries
        documents = self._document.read(texts, prompt, truncation)
        return [
            replace(text, ids=text.ids | WITHOUT_VECTOR * np.isin(text.ids, self._skipped))
            for text in documents
        ]

    def _expand(self, query: TokenizedText) -> TokenizedText:
        """Append tokens to the query up to the length of the expansion."""
        missing = self._expansion_ids[len(query.ids) :]
        ids = np.concatenate((query.ids, missing))
        return TokenizedText(ids, query.original_tokens + len(missing), query.exact)

    def _with_vector(self, ids: TokenIds) -> slice | npt.NDArray[np.bool_]:
        without = (ids & WITHOUT_VECTOR) != 0
        return ~without if without.any() else slice(None)


def _require_token(tokenizer: TextTokenizer, token: str, role: str) -> int:
    token_id = tokenizer.token_id(token)
    if token_id is None:
        raise StartupError(f"the vocabulary lacks the {role} {token!r} of the configuration")
    return token_id


def _find_expansion_ids(
    expansion: Expansion | None, folder: Path, tokenizer: TextTokenizer
) -> TokenIds:
    """Return the ids that fill up a query; raises `StartupError` if no token is named for it."""
    if expansion is None:
        return NO_IDS
    side = read_optional(folder / "tokenizer_config.json").get("padding_side")
    if side == "left" if side else tokenizer.pads_left:
        raise StartupError(
            f"the tokenizer in {folder} pads texts on the left, and queries can only be filled up "
            "with tokens on the right"
        )
    name = expansion.token or read_special_token(folder, "mask_token")
    name = name or read_special_token(folder, "eos_token")
    if name is None:
        raise StartupError(f"{folder} expands queries, and names no mask token to do it with")
    token = _require_token(tokenizer, name, "mask token")
    return np.full(expansion.length, token if expansion.attended else token | UNATTENDED, np.int64)
