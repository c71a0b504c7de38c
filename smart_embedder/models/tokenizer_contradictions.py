"""Which tokenizer transformers makes of a folder's files, where that is not `tokenizer.json` alone.

Some classes of transformers build a tokenizer anew and take no more than the vocabulary from that
file, and tokens that other files name are added to it. transformers takes seconds to import, so it
is asked only where it may read otherwise: tokenizers of the usual forms are known here.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordPiece

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import read_optional
from smart_embedder.tokens import TokenIds

log = structlog.get_logger(__name__)

# What `tokenizer_config.json` may say of the text, besides `tokenizer.json`.
_READING = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space")
# The errors that transformers raises for files of a tokenizer that it cannot use.
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
_PREPENDS = {"always": True, "never": False}
# Qwen's own pre-tokenizer, from Qwen2 on.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The classes that read tokenizer.json as it is, and those that build a tokenizer of a form below,
# which are also taken for a type of model where no class is named.
_GENERIC = {"PreTrainedTokenizer", "TokenizersBackend"}
_BERT, _ROBERTA, _XLM, _QWEN = (
    "BertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer", "Qwen2Tokenizer",
)  # fmt: skip
_CLASSES = {
    "bert": _BERT, "distilbert": _BERT, "roberta": _ROBERTA, "xlm-roberta": _XLM, "qwen2": _QWEN,
    "qwen3": _QWEN,
}  # fmt: skip
# Types for which transformers believes whoever names a class that takes the file as it is; for some
# others, such as Qwen2, it does not. Their families need transformers anyway.
_BELIEVED = {"bert", "camembert", "qwen3", "roberta", "xlm-roberta"}
# Where tokens are named: one under a name, several, or all by their ids.
_NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_SEVERAL = ("additional_special_tokens", "extra_special_tokens")
_BY_ID = "added_tokens_decoder"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
# Parts of a tokenizer that decide which tokens a text has.
_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
# In the file of a Unigram model: transformers' classes have no bytes, and this unknown token.
_UNKNOWN = re.compile(rb'"unk_id"\s*:\s*(\d+)')
_BYTES = re.compile(rb'"byte_fallback"\s*:\s*true')
_XLM_UNKNOWN = 3
_LONGEST_WORD = 100
# Characters of which a vocabulary lacks at least one, unless it has all bytes.
_RARE = "\ua015 \u13a3 \u2603 \U0001f9ff"


def as_transformers_reads(tokenizer: Tokenizer, content: bytes, folder: Path) -> Tokenizer:
    """The tokenizer of `tokenizer.json`, or transformers' own where that is another.

    `content` is the file's. Raises `StartupError` for what neither reads.
    """
    config = read_optional(folder / "tokenizer_config.json")
    named = {**config, **read_optional(folder / "special_tokens_map.json")}
    contradicted = _contradicted(tokenizer, config)
    adds = config.get("split_special_tokens") is True or _adds_tokens(tokenizer, named, folder)
    if not (contradicted or adds or _may_be_built_anew(tokenizer, content, named, folder)):
        return tokenizer
    from transformers import AutoTokenizer  # noqa: PLC0415 - see above

    try:
        own = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        read: Tokenizer = own.backend_tokenizer
        require_unknown_words(read)
    except (*_LOADING_ERRORS, StartupError) as error:
        if not contradicted:  # Then nothing else than the file says how texts are read.
            return tokenizer
        raise StartupError(
            f"tokenizer_config.json in {folder} contradicts its tokenizer.json in "
            f"{', '.join(contradicted)}, and transformers, which decides what counts, cannot read "
            "them"
        ) from error
    followed = sorted({*contradicted} - {*_contradicted(read, config)}) or _different(
        tokenizer, read
    )
    if not followed:
        return tokenizer
    log.info(
        "tokenizer_json_contradicted",
        members=followed,
        detail="transformers follows other files or the defaults of its class, and so are texts "
        "read",
    )
    return read


def require_unknown_words(tokenizer: Tokenizer) -> None:
    """Raise `StartupError` where a tokenizer cannot read a word that it does not know."""
    try:
        tokenizer.encode(_RARE, add_special_tokens=False)
    except Exception as error:  # The tokenizers library raises bare Exception.
        raise StartupError(f"the tokenizer cannot read an unknown word: {error}") from error


def _contradicted(tokenizer: Tokenizer, config: dict[str, Any]) -> list[str]:
    """The members of `tokenizer_config.json`, or their defaults, that the tokenizer does not do."""
    does: dict[str, bool | None] = {}
    expected = {name: config[name] for name in _READING if isinstance(config.get(name), bool)}
    normalizer = tokenizer.normalizer
    if normalizer is not None:
        does["do_lower_case"] = normalizer.normalize_str("A") == "a"
        does["strip_accents"] = normalizer.normalize_str("\u00e9") == "e"
    for step in steps_of(normalizer, "normalizers"):
        if step["type"] == "BertNormalizer":
            does["tokenize_chinese_chars"] = step["handle_chinese_chars"]
            lower = expected.setdefault("do_lower_case", True)
            expected = {"strip_accents": lower, "tokenize_chinese_chars": True} | expected
    for step in steps_of(tokenizer.pre_tokenizer, "pretokenizers"):
        if step["type"] == "ByteLevel":
            does["add_prefix_space"] = step["add_prefix_space"]
            expected.setdefault("add_prefix_space", False)
        elif step["type"] == "Metaspace":
            # "first" is neither: it depends on how the text is split before.
            does["add_prefix_space"] = _PREPENDS.get(step["prepend_scheme"])
            expected.setdefault("add_prefix_space", True)
    return [name for name, done in does.items() if expected.get(name, done) != done]


def _adds_tokens(tokenizer: Tokenizer, named: Mapping[str, Any], folder: Path) -> bool:
    """Whether other files name tokens that `tokenizer.json` does not have, or not so."""
    known = {each.content: each for each in tokenizer.get_added_tokens_decoder().values()}
    found = [named.get(name) for name in _NAMED]
    for each in (*map(named.get, _SEVERAL), named.get(_BY_ID)):
        found += each.values() if isinstance(each, dict) else each if isinstance(each, list) else []
    found += read_optional(folder / "added_tokens.json")
    for token in found:
        given = token if isinstance(token, dict) else {"content": token}
        content = given.get("content")
        if isinstance(content, str):
            flags = {name: given[name] for name in _FLAGS if name in given}
            own = known.get(content)
            if own is None or any(getattr(own, name) != flags[name] for name in flags):
                return True
    return False


def _may_be_built_anew(
    tokenizer: Tokenizer, content: bytes, named: Mapping[str, Any], folder: Path
) -> bool:
    """Whether transformers may build something else than this tokenizer for its class."""
    config = read_optional(folder / "config.json")
    kind = named.get("tokenizer_class") or config.get("tokenizer_class")
    model_type = str(config.get("model_type"))
    kind = str(kind or _CLASSES.get(model_type)).removesuffix("Fast")
    if kind in _GENERIC:
        return model_type not in _BELIEVED
    return not _is_usual(kind, tokenizer, content, named)


def _is_usual(kind: str, tokenizer: Tokenizer, content: bytes, named: Mapping[str, Any]) -> bool:
    """Whether a tokenizer is what the class would build; False for classes that are not known."""
    model = tokenizer.model
    normalizer = steps_of(tokenizer.normalizer, "normalizers")
    words = steps_of(tokenizer.pre_tokenizer, "pretokenizers")
    kinds = [each["type"] for each in normalizer], [each["type"] for each in words]
    if kind == _BERT:
        is_usual = kinds == (["BertNormalizer"], ["BertPreTokenizer"])
        is_usual = is_usual and normalizer[0]["clean_text"] and isinstance(model, WordPiece)
        return is_usual and (
            (model.continuing_subword_prefix, model.max_input_chars_per_word, model.unk_token)
            == ("##", _LONGEST_WORD, _named(named, "unk_token", "[UNK]"))
            and _has_frame(tokenizer, named, ("cls_token", "[CLS]"), ("sep_token", "[SEP]"), 1)
        )
    if kind == _XLM:
        unknown = _UNKNOWN.search(content)
        # A class leaves out what changes only spaces, at which texts are split anyway.
        normalizer = [each for each in normalizer if not _changes_spaces(each)]
        is_usual = [each["type"] for each in normalizer] in ([], ["Precompiled"])
        is_usual = is_usual and kinds[1] == ["WhitespaceSplit", "Metaspace"]
        is_usual = is_usual and words[1]["replacement"] == "\u2581" and isinstance(model, Unigram)
        is_usual = is_usual and unknown is not None and int(unknown[1]) == _XLM_UNKNOWN
        return (
            is_usual
            and _BYTES.search(content) is None
            and _has_frame(tokenizer, named, ("bos_token", "<s>"), ("eos_token", "</s>"), 2)
        )
    if not isinstance(model, BPE) or model.dropout or model.fuse_unk or model.byte_fallback:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges:
        return False
    if kind == _ROBERTA:
        is_usual = kinds == ([], ["ByteLevel"]) and words[0]["use_regex"]
        frame = ("cls_token", "<s>"), ("sep_token", "</s>")
        return is_usual and _has_frame(tokenizer, named, *frame, 2)
    is_usual = kind == _QWEN and kinds == (["NFC"], ["Split", "ByteLevel"])
    return is_usual and (
        (words[0]["pattern"], words[0]["behavior"], words[0]["invert"], words[1]["use_regex"])
        == ({"Regex": QWEN_WORDS}, "Isolated", False, False)
    )


def _changes_spaces(step: dict[str, Any]) -> bool:
    """Whether a normalizer's step strips spaces, or makes one of several."""
    if step["type"] == "Strip":
        return True
    several = step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"}
    return several and step["content"] in {" ", "\u2581"}


def _named(named: Mapping[str, Any], name: str, default: str) -> Any:
    token = named.get(name) or default
    return token.get("content") if isinstance(token, dict) else token


def _has_frame(
    tokenizer: Tokenizer,
    named: Mapping[str, Any],
    first: tuple[str, str],
    last: tuple[str, str],
    between: int,
) -> bool:
    """Whether texts stand between these tokens, and so many of the second lie between a pair."""
    begin, end = (tokenizer.token_to_id(_named(named, *each)) for each in (first, last))
    return _frames(tokenizer) == [[[begin], [end]], [[begin], [end] * between, [end]]]


def _frames(tokenizer: Tokenizer) -> list[list[list[int]]] | None:
    """The special tokens around a text and around two; None where a text is itself changed."""
    truncation, padding = tokenizer.truncation, tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        both = template_of(tokenizer, "a"), template_of(tokenizer, "a", "b")
        return [[each.tolist() for each in template] for template in both]
    except StartupError:
        return None
    finally:
        if truncation is not None:
            tokenizer.enable_truncation(**truncation)
        if padding is not None:
            tokenizer.enable_padding(**padding)


def template_of(tokenizer: Tokenizer, first: str, second: str | None = None) -> list[TokenIds]:
    """The special tokens before, between and after these plain texts, found by their positions."""
    rest: list[int] = tokenizer.encode(first, second, add_special_tokens=True).ids
    template: list[list[int]] = []
    for text in (first,) if second is None else (first, second):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        places = range(len(rest) - len(ids) + 1)
        start = next((each for each in places if rest[each : each + len(ids)] == ids), None)
        if start is None:
            raise StartupError(
                "tokenizer.json changes the text itself where it adds special tokens"
            )
        template.append(rest[:start])
        rest = rest[start + len(ids) :]
    return [np.array(each, np.int64) for each in (*template, rest)]


def _different(ours: Tokenizer, theirs: Tokenizer) -> list[str]:
    """The parts in which two tokenizers differ; how they are written down does not count."""
    parts = [_parts(each) for each in (ours, theirs)]
    different = [name for name in parts[0] if parts[0][name] != parts[1][name]]
    if ours.encode_special_tokens != theirs.encode_special_tokens:
        different.append("split_special_tokens")
    return different


def _parts(tokenizer: Tokenizer) -> dict[str, Any]:
    described = json.loads(tokenizer.to_str())
    # The vocabulary is taken from the same file, and numbers are rounded otherwise.
    for table in ("vocab", "merges"):
        described["model"][table] = len(described["model"].get(table, ()))
    parts = {name: _plain(described[name]) for name in _PARTS}
    parts["added_tokens"] = [
        {name: token[name] for name in ("id", "content", *_FLAGS)}
        for token in sorted(described["added_tokens"], key=lambda token: int(token["id"]))
    ]
    for name, several in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        part = parts[name] or {several: []}
        parts[name] = part.get(several, [part])
    parts["post_processor"] = _frames(tokenizer) or parts["post_processor"]
    return parts


def _plain(part: Any) -> Any:
    """Without members that say what is so anyway."""
    if not isinstance(part, dict):
        return part
    return {name: each for name, each in part.items() if each not in (None, False, "")}


def steps_of(component: Any, parts: str) -> list[dict[str, Any]]:
    """A normalizer's or pre-tokenizer's steps, whose sequences are called `parts` in the file."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = described.get(parts, [described])
    return steps
