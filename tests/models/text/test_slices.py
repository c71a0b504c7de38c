"""A long text tokenised in slices has the tokens that it has as a whole."""

import re
import sys
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex as Pattern
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers.models.qwen2 import tokenization_qwen2

from smart_embedder.engine.scheduling.admission import normalization_growth
from smart_embedder.models.text import slices as pieces
from smart_embedder.models.text.slices import QWEN_WORDS, RunShortener, Slicer
from smart_embedder.models.text.tokenizer import TextTokenizer
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


def qwen_words(folder: Path) -> Tokenizer:
    """The tiny Qwen's vocabulary behind the words of the real one's pre-tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    split = Split(Pattern(tokenization_qwen2.PRETOKENIZE_REGEX), "isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of the whole text at once."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@given(TEXTS)
@settings(max_examples=60)
def test_a_border_changes_no_token(tokenizer: Tokenizer, text: str) -> None:
    """Cut at every border at once, not only at those that slices end at."""
    places = [found.end() for found in re.finditer(pieces._borders_of(tokenizer), text)]
    parts = [text[start:stop] for start, stop in pairwise([0, *places, len(text)])]
    apart = [token for part in parts for token in ids_of(tokenizer, part)]
    assert apart == ids_of(tokenizer, text)


ODD = st.lists(st.sampled_from([*ODD_TEXTS, *MARKS, *GAPS]), max_size=12).map("".join)


@pytest.mark.parametrize("from_end", [False, True])
@given(ODD | st.text(), st.integers(1, 400))
@settings(max_examples=40)
def test_slices_are_the_text_and_bounded(
    tokenizer: Tokenizer, from_end: bool, text: str, characters: int
) -> None:
    slices = list(Slicer(tokenizer, characters).slices(text, from_end=from_end))
    assert "".join(reversed(slices) if from_end else slices) == text
    assert all(
        len(each) == 1 or len(each) * normalization_growth(each) <= characters for each in slices
    )


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize(
    "unit", ["ordinary words ", "検索の言葉。\n", "वर्ष की खोज ", "x = f(y);\n"]
)
def test_ordinary_text_is_never_cut_hard(tokenizer: Tokenizer, unit: str, from_end) -> None:
    text = unit * (4000 // len(unit))
    slices = list(Slicer(tokenizer, 400).slices(text, from_end=from_end))
    assert len(slices) > 9
    in_order = reversed(slices) if from_end else slices
    assert [each for part in in_order for each in ids_of(tokenizer, part)] == ids_of(
        tokenizer, text
    )


@pytest.mark.parametrize(
    ("characters", "from_end", "expected"),
    [
        (11, False, ["ab cd ef gh"]),  # It fits exactly.
        (10, False, ["ab cd ef", " gh"]),
        (8, False, ["ab cd ef", " gh"]),
        (7, False, ["ab cd", " ef gh"]),
        (11, True, ["ab cd ef gh"]),
        (10, True, [" cd ef gh", "ab"]),
        (9, True, [" cd ef gh", "ab"]),
        (8, True, [" ef gh", "ab cd"]),
        (1, True, [*"hg fe dc ba"]),  # Without a border it is cut hard.
    ],
)
def test_a_slice_is_as_long_as_it_may_be(tokenizer, characters, from_end, expected) -> None:
    assert list(Slicer(tokenizer, characters).slices("ab cd ef gh", from_end=from_end)) == expected


def decomposed() -> list[str]:
    """Every character that some normalisation changes, and every letter of Hangul."""
    everything = map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)])
    return [c for c in everything if unicodedata.decomposition(c) or "가" <= c <= "힣"]


def test_no_character_grows_by_more_than_is_said() -> None:
    for character in decomposed():
        growth = normalization_growth(character)
        for form in ("NFC", "NFD", "NFKC", "NFKD"):
            normal = unicodedata.normalize(form, character)
            assert len(normal) <= growth, character
            assert len(normal.encode()) <= 4 * growth, character


def test_no_border_follows_a_letter_that_ends_in_a_mark_under_nfc(tiny_qwen: Path) -> None:
    border = re.compile(pieces._borders_of(qwen_words(tiny_qwen)))
    letters = filter(str.isalnum, decomposed())
    apart = [c for c in letters if not unicodedata.normalize("NFC", c)[-1].isalnum()]
    assert len(apart) > 50
    assert not any(border.search(f"{c}.") for c in apart)


def test_qwens_words_are_those_of_transformers() -> None:
    assert QWEN_WORDS == tokenization_qwen2.PRETOKENIZE_REGEX


def test_a_tokenizer_of_another_kind_is_cut_between_letters_alone(tiny_qwen: Path) -> None:
    tokenizer = qwen_words(tiny_qwen)
    tokenizer.pre_tokenizer = Split(Pattern("[a-z]+"), "isolated")
    assert list(Slicer(tokenizer, 9).slices("ab. cd ef, gh")) == ["ab. cd", " ef, gh"]


DROPPED = [*" \t\n\r\x01\x00\x7f\x85\u00a0\u200b\u3000\ufeff"]
RUNS = st.lists(
    st.sampled_from(DROPPED) | st.text(DROPPED, min_size=1, max_size=60), max_size=6
).map(lambda parts: "".join(part * 20 if len(part) == 1 else part for part in parts))


@given(st.lists(st.tuples(st.sampled_from(WORDS), RUNS), max_size=8), RUNS)
@settings(max_examples=40)
def test_shorter_runs_of_what_is_dropped_change_no_token(tokenizer: Tokenizer, parts, run) -> None:
    text = run + "".join(word + gap for word, gap in parts)
    short = RunShortener(tokenizer).shorten(text)
    assert ids_of(tokenizer, short) == ids_of(tokenizer, text)
    (tokens,) = TextTokenizer(tokenizer, 100).encode_plain([text], 80)
    assert tokens.ids.tolist() == ids_of(tokenizer, text)[:80]


@pytest.mark.parametrize("folder", ["tiny_m3", "demo_checkpoint"])
@pytest.mark.parametrize("run", [" ", "\t\n", "\x01", "\u3000", " \x02\r\n"])
def test_megabytes_of_what_is_dropped_are_not_tokenised(folder, run, request) -> None:
    tokenizer = TextTokenizer.from_folder(request.getfixturevalue(folder), 512)
    text = f"search {run * (3_000_000 // len(run))} vector"
    assert len(tokenizer._shortener.shorten(text)) < 50
    tokens, same = tokenizer.encode_plain([text, f"search {run} vector"], 510)
    assert tokens.ids.tolist() == same.ids.tolist()
    assert (tokens.total, tokens.exact) == (same.total, True)


def test_a_tokenizer_that_keeps_white_space_gets_all_of_it(tiny_qwen: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_qwen / "tokenizer.json"))
    assert RunShortener(tokenizer).shorten(" " * 100) == " " * 100
