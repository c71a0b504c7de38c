"""Tokenizers of the forms that published models have, with small vocabularies."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, Metaspace, Split, WhitespaceSplit

from tests.support.checkpoints import corpus
from tests.support.texts import ODD_TEXTS
from tests.support.words import qwen_words

# Reads the tokenizer of the folder of a fixture.
Read = Callable[[str], Tokenizer]
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


def _word_pieces(read: Read) -> Tokenizer:
    model = read("demo_checkpoint").model
    return _form(model, BertPreTokenizer(), normalizers.BertNormalizer(lowercase=True))


def _unigram(read: Read, words: Any) -> Tokenizer:
    """Return a tokenizer with SentencePiece's precompiled normalizer."""
    tokenizer = read("tiny_m3")
    return _form(tokenizer.model, words, tokenizer.normalizer)


def _bytes(read: Read, words: Any, normalizer: Any = None) -> Tokenizer:
    return _form(read("tiny_qwen").model, words, normalizer)


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


KINDS: dict[str, Callable[[Read], Tokenizer]] = {
    "word pieces": _word_pieces,
    "XLM-RoBERTa": lambda read: _unigram(
        read, pre_tokenizers.Sequence([WhitespaceSplit(), Metaspace()])
    ),
    "T5": lambda read: _unigram(read, Metaspace()),
    "bytes behind a space": lambda read: _bytes(read, ByteLevel(add_prefix_space=True)),
    "Qwen": lambda read: _bytes(read, qwen_words(), normalizers.NFC()),
    "Llama 2": lambda _: _form(
        _sign_bpe(), None, normalizers.Sequence([normalizers.Prepend("\u2581"), _SIGN])
    ),
    "Mistral": lambda _: _form(_sign_bpe(), Metaspace(prepend_scheme="first", split=False)),
    "Gemma": lambda _: _form(_sign_bpe(), Split(" ", "merged_with_previous"), _SIGN),
    "CLIP": lambda _: _clip(),
}
