"""Texts of words and gaps for tests of token borders, and the ids of a whole text."""

from hypothesis import strategies as st
from tokenizers import Regex as Pattern
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers.models.qwen2 import tokenization_qwen2

from tests.support.texts import ODD_TEXTS

MARKS = ["\u0301", "\u0323", "\u0338", "\u093c", "\u0e33", "\u200d", "\ufe0f", "\u0600", "\u0d4e"]
WORDS = [
    *["search", "the", "naïve", "42", "7", "a.", "(b", "検索", "言葉。", "é", "é", "'s", "don't"],
    *["<mask>", "</s>", "<|im_end|>", "[SEP]", "\u0958", "की", "각", "\u1100", "\u1161", "ﷺ", "½"],
    *["{}", "!!!", "]", ">", "_", "-", "،", "।", "👍🏽", "🇩🇪", *MARKS],
]
GAPS = [" ", " ", "  ", "\n", "\n\n", "\r\n", "\t ", "\u3000", "\u00a0", "\u2028", ", ", "。\n", ""]
TEXTS = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=60).map(
    lambda parts: "".join(word + gap for word, gap in parts)
)
ODD = st.lists(st.sampled_from([*ODD_TEXTS, *MARKS, *GAPS]), max_size=12).map("".join)


def qwen_words() -> Sequence:
    """Return the pre-tokenizer of published Qwen models."""
    split = Split(Pattern(tokenization_qwen2.PRETOKENIZE_REGEX), "isolated")
    return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize the whole text at once."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
