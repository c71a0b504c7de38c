"""Loads the tokenizer that transformers would use where it differs from `tokenizer.json`.

Some classes of transformers take only the vocabulary from that file and build the rest anew, and
tokens that other files name are added. transformers takes seconds to import, so it is imported only
for tokenizers that do not have one of the usual forms.
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

# Options in `tokenizer_config.json` that may contradict `tokenizer.json`.
_OPTIONS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space")
# The errors of transformers for tokenizer files that it cannot use.
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
_PREPENDS = {"always": True, "never": False}
# The pre-tokenizer of Qwen, from Qwen2 on.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Classes that read tokenizer.json as it is.
_GENERIC = {"PreTrainedTokenizer", "TokenizersBackend"}
# Classes that build a tokenizer of a known form, by the type of the model whose default they are.
_BERT, _ROBERTA, _XLM, _QWEN = (
    "BertTokenizer", "RobertaTokenizer", "XLMRobertaTokenizer", "Qwen2Tokenizer",
)  # fmt: skip
_CLASSES = {
    "bert": _BERT, "distilbert": _BERT, "roberta": _ROBERTA, "xlm-roberta": _XLM, "qwen2": _QWEN,
    "qwen3": _QWEN,
}  # fmt: skip
# Types for which transformers uses a generic class that the configuration names. For some others,
# such as Qwen2, it does not; their families import transformers anyway.
_ACCEPT_GENERIC = {"bert", "camembert", "qwen3", "roberta", "xlm-roberta"}
# Members of the configuration that name one token, several tokens, or all tokens by their ids.
_NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_SEVERAL = ("additional_special_tokens", "extra_special_tokens")
_BY_ID = "added_tokens_decoder"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
# Parts of a tokenizer that decide which tokens a text has.
_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "model")
# Members of a Unigram model. Classes of transformers set no `byte_fallback`, and this `unk_id`.
_UNKNOWN_ID = re.compile(rb'"unk_id"\s*:\s*(\d+)')
_BYTE_FALLBACK = re.compile(rb'"byte_fallback"\s*:\s*true')
_XLM_UNKNOWN_ID = 3
_LONGEST_WORD = 100
# Every vocabulary lacks one of these characters, unless it has all bytes.
_RARE = "\ua015 \u13a3 \u2603 \U0001f9ff"


def follow_transformers(tokenizer: Tokenizer, content: bytes, folder: Path) -> Tokenizer:
    """Return the tokenizer of `tokenizer.json`, or that of transformers if it differs.

    `content` is that of the file. Raises `StartupError` if neither can be used.
    """
    config = read_optional(folder / "tokenizer_config.json")
    named = {**config, **read_optional(folder / "special_tokens_map.json")}
    contradicted = _contradicted_options(tokenizer, config)
    adds = config.get("split_special_tokens") is True or _adds_tokens(tokenizer, named, folder)
    if not (contradicted or adds or _may_be_built_anew(tokenizer, content, named, folder)):
        return tokenizer
    from transformers import AutoTokenizer  # noqa: PLC0415 - see above

    try:
        theirs: Tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
        require_unknown_words(theirs)
    except (*_LOADING_ERRORS, StartupError) as error:
        if not contradicted:  # Then only tokenizer.json says how texts are tokenized.
            return tokenizer
        raise StartupError(
            f"tokenizer_config.json in {folder} contradicts its tokenizer.json in "
            f"{', '.join(contradicted)}, and transformers, which decides between them, cannot load "
            "the tokenizer"
        ) from error
    followed = sorted({*contradicted} - {*_contradicted_options(theirs, config)})
    followed = followed or _different_parts(tokenizer, theirs)
    if not followed:
        return tokenizer
    log.info(
        "tokenizer_json_contradicted",
        members=followed,
        detail="texts are tokenized as by transformers, which follows other files, or the defaults "
        "of its class, in place of tokenizer.json",
    )
    return theirs


def require_unknown_words(tokenizer: Tokenizer) -> None:
    """Raise `StartupError` if a tokenizer fails at a word that its vocabulary lacks."""
    try:
        tokenizer.encode(_RARE, add_special_tokens=False)
    except Exception as error:  # The tokenizers library raises bare Exception.
        raise StartupError(f"the tokenizer cannot read an unknown word: {error}") from error


def _contradicted_options(tokenizer: Tokenizer, config: dict[str, Any]) -> list[str]:
    """List options of `tokenizer_config.json`, also defaults, that the tokenizer contradicts."""
    actual: dict[str, bool | None] = {}
    expected = {name: config[name] for name in _OPTIONS if isinstance(config.get(name), bool)}
    normalizer = tokenizer.normalizer
    if normalizer is not None:
        actual["do_lower_case"] = normalizer.normalize_str("A") == "a"
        actual["strip_accents"] = normalizer.normalize_str("\u00e9") == "e"
    for step in read_steps(normalizer, "normalizers"):
        if step["type"] == "BertNormalizer":
            actual["tokenize_chinese_chars"] = step["handle_chinese_chars"]
            lower = expected.setdefault("do_lower_case", True)
            expected = {"strip_accents": lower, "tokenize_chinese_chars": True} | expected
    for step in read_steps(tokenizer.pre_tokenizer, "pretokenizers"):
        if step["type"] == "ByteLevel":
            actual["add_prefix_space"] = step["add_prefix_space"]
            expected.setdefault("add_prefix_space", False)
        elif step["type"] == "Metaspace":
            # "first" is neither: it depends on how the text is split before.
            actual["add_prefix_space"] = _PREPENDS.get(step["prepend_scheme"])
            expected.setdefault("add_prefix_space", True)
    return [name for name, value in actual.items() if expected.get(name, value) != value]


def _adds_tokens(tokenizer: Tokenizer, named: Mapping[str, Any], folder: Path) -> bool:
    """Return whether other files name tokens that `tokenizer.json` lacks, or has otherwise."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    found = [named.get(name) for name in _NAMED]
    for tokens in (*map(named.get, _SEVERAL), named.get(_BY_ID)):
        if isinstance(tokens, dict):
            found += tokens.values()
        elif isinstance(tokens, list):
            found += tokens
    found += read_optional(folder / "added_tokens.json")
    for token in found:
        entry = token if isinstance(token, dict) else {"content": token}
        content = entry.get("content")
        if isinstance(content, str):
            flags = {name: entry[name] for name in _FLAGS if name in entry}
            added = known.get(content)
            if added is None or any(getattr(added, name) != flags[name] for name in flags):
                return True
    return False


def _may_be_built_anew(
    tokenizer: Tokenizer, content: bytes, named: Mapping[str, Any], folder: Path
) -> bool:
    """Return whether transformers may build another tokenizer than this one for its class."""
    config = read_optional(folder / "config.json")
    kind = named.get("tokenizer_class") or config.get("tokenizer_class")
    model_type = str(config.get("model_type"))
    kind = str(kind or _CLASSES.get(model_type)).removesuffix("Fast")
    if kind in _GENERIC:
        return model_type not in _ACCEPT_GENERIC
    return not _has_form_of(kind, tokenizer, content, named)


def _has_form_of(kind: str, tokenizer: Tokenizer, content: bytes, named: Mapping[str, Any]) -> bool:
    """Return whether the class `kind` would build this tokenizer; False for an unknown class."""
    model = tokenizer.model
    normalizer = read_steps(tokenizer.normalizer, "normalizers")
    words = read_steps(tokenizer.pre_tokenizer, "pretokenizers")
    kinds = [step["type"] for step in normalizer], [step["type"] for step in words]
    if kind == _BERT:
        is_usual = kinds == (["BertNormalizer"], ["BertPreTokenizer"])
        is_usual = is_usual and normalizer[0]["clean_text"] and isinstance(model, WordPiece)
        return is_usual and (
            (model.continuing_subword_prefix, model.max_input_chars_per_word, model.unk_token)
            == ("##", _LONGEST_WORD, _token_named(named, "unk_token", "[UNK]"))
            and _has_template(tokenizer, named, ("cls_token", "[CLS]"), ("sep_token", "[SEP]"), 1)
        )
    if kind == _XLM:
        unknown = _UNKNOWN_ID.search(content)
        # The class leaves out steps that only change spaces, where texts are split anyway.
        normalizer = [step for step in normalizer if not _changes_spaces(step)]
        is_usual = [step["type"] for step in normalizer] in ([], ["Precompiled"])
        is_usual = is_usual and kinds[1] == ["WhitespaceSplit", "Metaspace"]
        is_usual = is_usual and words[1]["replacement"] == "\u2581" and isinstance(model, Unigram)
        is_usual = is_usual and unknown is not None and int(unknown[1]) == _XLM_UNKNOWN_ID
        return (
            is_usual
            and _BYTE_FALLBACK.search(content) is None
            and _has_template(tokenizer, named, ("bos_token", "<s>"), ("eos_token", "</s>"), 2)
        )
    if not isinstance(model, BPE) or model.dropout or model.fuse_unk or model.byte_fallback:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges:
        return False
    if kind == _ROBERTA:
        is_usual = kinds == ([], ["ByteLevel"]) and words[0]["use_regex"]
        ends = ("cls_token", "<s>"), ("sep_token", "</s>")
        return is_usual and _has_template(tokenizer, named, *ends, 2)
    is_usual = kind == _QWEN and kinds == (["NFC"], ["Split", "ByteLevel"])
    return is_usual and (
        (words[0]["pattern"], words[0]["behavior"], words[0]["invert"], words[1]["use_regex"])
        == ({"Regex": QWEN_WORDS}, "Isolated", False, False)
    )


def _changes_spaces(step: dict[str, Any]) -> bool:
    """Return whether a step of a normalizer strips spaces, or joins several into one."""
    if step["type"] == "Strip":
        return True
    is_join = step["type"] == "Replace" and step["pattern"] == {"Regex": " {2,}"}
    return is_join and step["content"] in {" ", "\u2581"}


def _token_named(named: Mapping[str, Any], name: str, default: str) -> Any:
    token = named.get(name) or default
    return token.get("content") if isinstance(token, dict) else token


def _has_template(
    tokenizer: Tokenizer,
    named: Mapping[str, Any],
    first: tuple[str, str],
    last: tuple[str, str],
    between: int,
) -> bool:
    """Return whether `first` and `last` enclose texts, with `last` `between` times in a pair."""
    begin, end = (tokenizer.token_to_id(_token_named(named, *token)) for token in (first, last))
    return _templates(tokenizer) == [[[begin], [end]], [[begin], [end] * between, [end]]]


def _templates(tokenizer: Tokenizer) -> list[list[list[int]]] | None:
    """Find the special tokens around a text and a pair; None if they change the text itself."""
    truncation, padding = tokenizer.truncation, tokenizer.padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        templates = find_template(tokenizer, "a"), find_template(tokenizer, "a", "b")
        return [[ids.tolist() for ids in template] for template in templates]
    except StartupError:
        return None
    finally:
        if truncation is not None:
            tokenizer.enable_truncation(**truncation)
        if padding is not None:
            tokenizer.enable_padding(**padding)


def find_template(tokenizer: Tokenizer, first: str, second: str | None = None) -> list[TokenIds]:
    """Find the special tokens before, between and after these plain texts, by tokenizing them."""
    rest: list[int] = tokenizer.encode(first, second, add_special_tokens=True).ids
    template: list[list[int]] = []
    for text in (first,) if second is None else (first, second):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        starts = range(len(rest) - len(ids) + 1)
        start = next((start for start in starts if rest[start : start + len(ids)] == ids), None)
        if start is None:
            raise StartupError(
                "tokenizer.json changes the text itself where it adds special tokens"
            )
        template.append(rest[:start])
        rest = rest[start + len(ids) :]
    return [np.array(ids, np.int64) for ids in (*template, rest)]


def _different_parts(ours: Tokenizer, theirs: Tokenizer) -> list[str]:
    """Name the parts in which two tokenizers differ, apart from how they are written down."""
    our_parts, their_parts = _parts(ours), _parts(theirs)
    different = [name for name in our_parts if our_parts[name] != their_parts[name]]
    if ours.encode_special_tokens != theirs.encode_special_tokens:
        different.append("split_special_tokens")
    return different


def _parts(tokenizer: Tokenizer) -> dict[str, Any]:
    described = json.loads(tokenizer.to_str())
    # Both have the vocabulary of the same file, whose numbers are rounded differently.
    for table in ("vocab", "merges"):
        described["model"][table] = len(described["model"].get(table, ()))
    parts = {name: _without_defaults(described[name]) for name in _PARTS}
    parts["added_tokens"] = [
        {name: token[name] for name in ("id", "content", *_FLAGS)}
        for token in sorted(described["added_tokens"], key=lambda token: int(token["id"]))
    ]
    for name, several in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        part = parts[name] or {several: []}
        parts[name] = part.get(several, [part])
    parts["post_processor"] = _templates(tokenizer) or parts["post_processor"]
    return parts


def _without_defaults(part: Any) -> Any:
    """Drop the members of a part that are null, false or empty."""
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if value not in (None, False, "")}


def read_steps(component: Any, parts: str) -> list[dict[str, Any]]:
    """Read the steps of a normalizer or pre-tokenizer; `parts` is the file's name for several."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    steps: list[dict[str, Any]] = described.get(parts, [described])
    return steps
