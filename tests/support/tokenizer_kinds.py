"""Tokenizers of the forms that published models have, with small vocabularies."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, Metaspace, Split, WhitespaceSplit
from transformers.models.qwen2 import tokenization_qwen2

from tests.support.checkpoints import corpus
from tests.support.texts import ODD_TEXTS

# Reads the tokenizer of the folder of a fixture.
Read = Callable[[str], Tokenizer]
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CLIP_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_SIGN = normalizers.Replace(" ", "\u2581")


def _form(model: models.Model, words: Any = None, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if words is not None:
        tokenizer.pre_tokenizer = words
    tokenizer.add_special_tokens([AddedToken("</s>"), AddedToken("<mask>", lstrip=True)])
    return tokenizer


def _train(model: models.Model, trainer: Any, words: Any) -> models.Model:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words
    tokenizer.train_from_iterator([*corpus(300), *ODD_TEXTS], trainer)
    return tokenizer.model


def _word_pieces(read: Read, *, lowercase: bool) -> Tokenizer:
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    return _form(read("demo_checkpoint").model, BertPreTokenizer(), normalizer)


def _unigram(read: Read, scheme: str, *, precompiled: bool = False, xlm: bool = False) -> Tokenizer:
    tokenizer, words = read("tiny_m3"), Metaspace(prepend_scheme=scheme)
    normalizer = tokenizer.normalizer if precompiled else None
    return _form(
        tokenizer.model,
        pre_tokenizers.Sequence([WhitespaceSplit(), words]) if xlm else words,
        normalizer,
    )


def _byte_level(
    read: Read, split: str | None = None, *, prefix: bool = False, ignore_merges: bool = False
) -> Tokenizer:
    model = read("tiny_qwen").model
    model.ignore_merges = ignore_merges
    words: Any = ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    if split is not None:
        words = pre_tokenizers.Sequence([Split(Regex(split), "isolated"), words])
    is_qwen = split == tokenization_qwen2.PRETOKENIZE_REGEX
    return _form(model, words, normalizers.NFC() if is_qwen else None)


@cache
def _sign_bpe() -> models.Model:
    """Train a BPE with U+2581 for spaces, and a token for each byte."""
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    empty = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    return _train(empty, trainer, Metaspace())


def _clip() -> Tokenizer:
    letters = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", *(f"{letter}</w>" for letter in letters)],
        initial_alphabet=letters,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    split = Split(Regex(_CLIP_WORDS), "removed", invert=True)
    words = pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False)])
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    steps = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    empty = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
    return _form(_train(empty, trainer, words), words, steps)


def _words() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False)
    words = pre_tokenizers.Whitespace()
    model = _train(models.WordLevel(unk_token="[UNK]"), trainer, words)
    return _form(model, words, normalizers.NFKC())


KINDS: dict[str, Callable[[Read], Tokenizer]] = {
    "word pieces": lambda read: _word_pieces(read, lowercase=True),
    "cased word pieces": lambda read: _word_pieces(read, lowercase=False),
    "XLM-RoBERTa": lambda read: _unigram(read, "always", precompiled=True, xlm=True),
    "T5": lambda read: _unigram(read, "always", precompiled=True),
    "Unigram, first": lambda read: _unigram(read, "first"),
    "Unigram, never": lambda read: _unigram(read, "never"),
    "GPT-2": _byte_level,
    "bytes behind a space": lambda read: _byte_level(read, prefix=True),
    "Qwen": lambda read: _byte_level(read, tokenization_qwen2.PRETOKENIZE_REGEX),
    "Llama 3": lambda read: _byte_level(read, _LLAMA3_WORDS, ignore_merges=True),
    "Llama 2": lambda _: _form(
        _sign_bpe(), None, normalizers.Sequence([normalizers.Prepend("\u2581"), _SIGN])
    ),
    "Mistral": lambda _: _form(_sign_bpe(), Metaspace(prepend_scheme="first", split=False)),
    "Gemma": lambda _: _form(_sign_bpe(), Split(" ", "merged_with_previous"), _SIGN),
    "CLIP": lambda _: _clip(),
    "words": lambda _: _words(),
}
