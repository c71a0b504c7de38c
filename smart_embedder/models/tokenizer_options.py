"""Applies what transformers 4 applied to a `tokenizer.json` from the files beside it.

These are options of BERT's normalizer, a space in front of texts in bytes, the tokens around texts
of Llama and Gemma, `split_special_tokens`, and tokens that `tokenizer.json` lacks.
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import structlog
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from smart_embedder.models.files.config import read_optional

log = structlog.get_logger(__name__)

EXAMPLES = (
    "Rivière жизнь 世界", "don't 3.14159 SEARCH", "  a\tb  c\n\n d", "a\u0301 \ufb01", "x_y (z)!?",
)  # fmt: skip
_SHOWN_IDS = 12
# Classes that read tokenizer.json as it is, and the types of static embeddings, which name none.
GENERIC = {"PreTrainedTokenizer", "TokenizersBackend", "model2vec", ""}
_BERT_DEFAULTS = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
# Classes of tokenizers that mark the two texts of a pair by default.
_SEGMENT_TOKENIZERS = {
    "BertTokenizer", "CanineTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer",
    "ElectraTokenizer", "FNetTokenizer", "MobileBertTokenizer",
}  # fmt: skip
# Options for the tokens around texts, and these tokens if they are not named.
_END_OPTIONS = ("add_bos_token", "add_eos_token")
_ENDS = {"LlamaTokenizer": ("<s>", "</s>"), "GemmaTokenizer": ("<bos>", "<eos>")}
# Members that name one special token, and several.
_NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_SEVERAL = ("additional_special_tokens", "extra_special_tokens")
_TOKEN_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def find_class(folder: Path) -> str:
    """Find the name of the tokenizer's class, without its ending, or else the type of the model."""
    model = read_optional(folder / "config.json")
    config = read_optional(folder / "tokenizer_config.json")
    kind = config.get("tokenizer_class") or model.get("tokenizer_class") or model.get("model_type")
    return str(kind or "").removesuffix("Fast")


def marks_segments(folder: Path) -> bool:
    """Return whether the tokenizer of transformers marks which text a token belongs to."""
    config = read_optional(folder / "tokenizer_config.json")
    if isinstance(inputs := config.get("model_input_names"), list):
        return "token_type_ids" in inputs
    named = config.get("tokenizer_class") or read_optional(folder / "config.json").get(
        "tokenizer_class"
    )
    return named is None or str(named).removesuffix("Fast") in _SEGMENT_TOKENIZERS


def apply_other_files(tokenizer: Tokenizer, folder: Path) -> bool:
    """Apply the files beside `tokenizer.json`; return whether they change its tokenizer."""
    config = read_optional(folder / "tokenizer_config.json")
    if not config.get("added_tokens_decoder"):  # It names all tokens.
        config |= read_optional(folder / "special_tokens_map.json")
    kind, tokens = find_class(folder), _find_tokens(tokenizer, config, folder)
    texts = [*EXAMPLES, *(f"a {token.content} b" for token in tokens)]
    ids_of_file = encode_texts(tokenizer, texts)
    tokenizer.encode_special_tokens = config.get("split_special_tokens") is True
    tokenizer.add_tokens(tokens)
    applied = [
        *(token.content for token in tokens),
        *_apply_bert_options(tokenizer, config, kind),
        *_apply_prefix_space(tokenizer, config, kind),
        *_apply_ends(tokenizer, config, kind),
    ]
    if applied:
        examples = zip(texts, encode_texts(tokenizer, texts), ids_of_file, strict=True)
        detail = (
            "files beside tokenizer.json contradict it, and are followed, as by transformers; "
            "servers that read tokenizer.json alone compute other_ids"
        )
        warn_of_contradiction(folder, applied, examples, detail)
    return bool(applied)


def _find_tokens(tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> list[AddedToken]:
    """Find tokens that `tokenizer.json` lacks or has otherwise, and that have an embedding."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    special = [config.get(name) for name in _NAMED]
    for tokens in map(config.get, _SEVERAL):
        special += tokens.values() if isinstance(tokens, dict) else tokens or ()
    named = {token.content: token for token in map(_read_token, filter(None, special))}
    by_id = config.get("added_tokens_decoder") or {
        token_id: {"content": content, "special": content in named}
        for content, token_id in read_optional(folder / "added_tokens.json").items()
        if content not in known
    }
    listed = [_read_token(by_id[token_id]) for token_id in sorted(by_id, key=int)]
    found = [token for token in listed if repr(token) != repr(known.get(token.content))]
    known |= {token.content: token for token in listed}
    found += [token for content, token in named.items() if content not in known]
    new = [token for token in found if tokenizer.token_to_id(token.content) is None]
    embedded = read_optional(folder / "config.json").get("vocab_size", sys.maxsize)
    without_embedding = new[max(0, embedded - tokenizer.get_vocab_size()) :]
    return [token for token in found if token not in without_embedding]


def _read_token(entry: str | dict[str, Any]) -> AddedToken:
    if isinstance(entry, str):
        return AddedToken(entry, special=True)
    options = {name: entry[name] for name in _TOKEN_OPTIONS if name in entry}
    return AddedToken(entry["content"], **{"special": True} | options)


def _apply_bert_options(tokenizer: Tokenizer, config: dict[str, Any], kind: str) -> list[str]:
    """Set the options of BERT's normalizer, or their defaults; return those that differed."""
    normalizer = tokenizer.normalizer
    is_bert = isinstance(normalizer, BertNormalizer) and isinstance(tokenizer.model, WordPiece)
    if not is_bert or kind in GENERIC:
        return []
    names = ("lowercase", "strip_accents", "handle_chinese_chars")
    in_file = [getattr(normalizer, name) for name in names]
    wanted = [config.get(option, default) for option, default in _BERT_DEFAULTS.items()]
    for values in (in_file, wanted):
        if values[1] is None:  # Then accents are stripped where letters are lowered.
            values[1] = values[0]
    rows = zip(_BERT_DEFAULTS, names, in_file, wanted, strict=True)
    differing = [row for row in rows if row[2] != row[3]]
    for _, name, _, value in differing:
        setattr(normalizer, name, value)
    return [option for option, *_ in differing]


def _apply_prefix_space(tokenizer: Tokenizer, config: dict[str, Any], kind: str) -> list[str]:
    """Set whether texts in bytes get a space in front; return the option if it differed."""
    words = tokenizer.pre_tokenizer
    wanted = config.get("add_prefix_space", None if kind in GENERIC else False)
    if not isinstance(words, ByteLevel) or wanted in {None, words.add_prefix_space}:
        return []
    words.add_prefix_space = wanted
    return ["add_prefix_space"]


def _apply_ends(tokenizer: Tokenizer, config: dict[str, Any], kind: str) -> list[str]:
    """Set the tokens around texts of Llama and Gemma; return the options if they differed."""
    options = [name for name in _END_OPTIONS if name in config]
    if kind not in _ENDS or not options:
        return []
    ends = zip(_NAMED, _ENDS[kind], strict=False)
    first, last = (_read_token(config.get(name) or default).content for name, default in ends)
    begin = [first] * config.get("add_bos_token", True)
    end = [last] * config.get("add_eos_token", False)
    ids_of_file, of_file = encode_texts(tokenizer, "a"), tokenizer.post_processor
    tokenizer.post_processor = TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *end, *begin, "$B", *end],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*begin, *end}],
    )
    if encode_texts(tokenizer, "a") != ids_of_file:
        return options
    if of_file is not None:
        tokenizer.post_processor = of_file
    return []


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Tokenize texts with special tokens, and without the padding of the file."""
    encodings = map(tokenizer.encode, texts)
    return [
        [token_id for token_id, seen in zip(found.ids, found.attention_mask, strict=True) if seen]
        for found in encodings
    ]


def warn_of_contradiction(
    folder: Path,
    members: list[str],
    examples: Iterable[tuple[str, list[int], list[int]]],
    detail: str,
) -> None:
    """Log the first text for which another reader of the folder computes other ids."""
    for text, ids, other_ids in examples:
        if ids != other_ids:
            log.warning(
                "tokenizer_json_contradicted",
                model=folder.name,
                members=members,
                text=text,
                ids=ids[:_SHOWN_IDS],
                other_ids=other_ids[:_SHOWN_IDS],
                detail=detail,
            )
            return
