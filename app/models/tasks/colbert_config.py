"""How a ColBERT model reads queries and documents, from the folders of three packages.

PyLate and sentence-transformers write `modules.json`, and `config_sentence_transformers.json` with
two marker tokens (PyLate) or with prompts. Stanford's ColBERT keeps the projection with the
weights, and the rest in `artifact.metadata`.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import StartupError
from app.models.checkpoint.config import read_config, read_optional
from app.models.checkpoint.modules import Module, read_modules, require_known_modules
from app.models.checkpoint.sentence_config import TextOptions, read_text_config

_STANFORD = "HF_ColBERT"
_LONGEST = 2**31
# Those of PyLate, for what its configuration leaves out.
_QUERY_LENGTH, _DOCUMENT_LENGTH = 32, 180
_MARKERS = {"query": "[Q] ", "document": "[D] "}
_STANFORD_MARKERS = {"query": "[unused0]", "document": "[unused1]"}


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
    return not modules and _is_stanford(folder)


def _is_stanford(folder: Path) -> bool:
    return _STANFORD in (read_config(folder).get("architectures") or ())


def read_colbert_config(folder: Path) -> ColbertConfig:
    """Read it; raises `StartupError` for options that are not known here."""
    require_known_modules(folder, "Transformer", "Dense", "MultiVectorMask", "Normalize", "Dropout")
    modules = read_modules(folder)
    mask = next((module for module in modules if module.kind == "MultiVectorMask"), None)
    if mask is not None:
        _require_unit_vectors(folder, modules)
        return _by_sentence_transformers(folder, mask)
    if not modules:
        return _by_stanford(read_optional(folder / "artifact.metadata"))
    return _by_pylate(read_optional(folder / "config_sentence_transformers.json"))


def _require_unit_vectors(folder: Path, modules: Sequence[Module]) -> None:
    """Raise `StartupError` where vectors are not scaled to unit length behind all projections."""
    steps = [each.kind for each in modules if each.kind in {"Dense", "Normalize"}]
    if "Normalize" not in steps or "Dense" in steps[steps.index("Normalize") :]:
        raise StartupError(
            f"{folder / 'modules.json'} does not end in Normalize, and vectors of tokens have unit "
            "length here"
        )


def _by_pylate(config: Mapping[str, Any]) -> ColbertConfig:
    query_length = _length(config, "query_length", _QUERY_LENGTH)
    expands = _or_default(config, "do_query_expansion", True)
    attended = bool(config.get("attend_to_expansion_tokens"))
    return ColbertConfig(
        query=Reading(
            marker=_or_default(config, "query_prefix", _MARKERS["query"]), length=query_length
        ),
        document=Reading(
            marker=_or_default(config, "document_prefix", _MARKERS["document"]),
            length=_length(config, "document_length", _DOCUMENT_LENGTH),
        ),
        expansion=Expansion(query_length, attended) if expands else None,
        skipped=_or_default(config, "skiplist_words", list(string.punctuation)),
        skips_unknown=True,
    )


def _by_stanford(metadata: Mapping[str, Any]) -> ColbertConfig:
    query_length = _length(metadata, "query_maxlen", _QUERY_LENGTH)
    return ColbertConfig(
        query=Reading(
            marker=_or_default(metadata, "query_token_id", _STANFORD_MARKERS["query"]),
            length=query_length,
        ),
        document=Reading(
            marker=_or_default(metadata, "doc_token_id", _STANFORD_MARKERS["document"]),
            length=_length(metadata, "doc_maxlen", _DOCUMENT_LENGTH),
        ),
        expansion=Expansion(query_length, bool(metadata.get("attend_to_mask_tokens"))),
        skipped=list(string.punctuation) if metadata.get("mask_punctuation", True) else [],
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
    expansion = _expansion(folder, texts.get("query_expansion"))
    return ColbertConfig(
        query=Reading(
            prompt=prompts.get("query") or "",
            length=expansion.length if expansion else _length(texts, "query_length", 0) or longest,
        ),
        document=Reading(
            prompt=_document_prompt(prompts), length=_length(texts, "document_length", 0) or longest
        ),
        expansion=expansion,
        skipped=masks.get("skiplist_words") or [] if "document" in tasks else [],
        skips_unknown=False,
    )


def _document_prompt(prompts: Mapping[str, Any]) -> str:
    named = (prompts[name] for name in ("document", "passage", "corpus") if name in prompts)
    return next(named, None) or ""


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
