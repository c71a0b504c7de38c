"""Tokenization, compared with transformers, and truncation from either side.

The reference for truncation is the whole text, tokenized at once and cut.
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from smart_embedder.errors import StartupError
from smart_embedder.models import tokenizer as tokenizer_module
from smart_embedder.models.tokenizer import TextTokenizer, find_template
from smart_embedder.requests import Side, TruncationOptions
from tests.support.texts import varied_texts
from tests.support.words import GAPS, ODD, TEXTS, WORDS, ids_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(scope="module")
def theirs(tiny_m3: Path):
    return AutoTokenizer.from_pretrained(tiny_m3)


@pytest.fixture(scope="module")
def limited(tiny_m3: Path) -> Callable[[int], TextTokenizer]:
    """Load a tokenizer for a limit, once for each limit."""
    return cache(lambda limit: TextTokenizer.from_folder(tiny_m3, limit))


def assert_like_theirs(ours: TextTokenizer, theirs, texts: list[str]) -> None:
    cut = theirs(texts, truncation=True, max_length=ours.max_length)["input_ids"]
    tokenized, whole = ours.encode(texts), map(len, theirs(texts)["input_ids"])
    assert [text.ids.tolist() for text in tokenized] == cut
    for text, count in zip(tokenized, whole, strict=True):
        # The tokens of a text that was cut before it was tokenized are only estimated.
        expected = (count, count > ours.max_length)
        assert (text.original_tokens, text.truncated) == expected or not text.exact


def test_token_ids_equal_transformers(limited, theirs) -> None:
    assert_like_theirs(limited(8192), theirs, varied_texts(200))


@given(text=TEXT, limit=st.integers(3, 20))
@settings(max_examples=200)
def test_truncation_equals_transformers(limited, theirs, text, limit) -> None:
    assert_like_theirs(limited(limit), theirs, [text])


class WatchedTokenizer:
    """A tokenizer that records its batches."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.batches: list[list[str]] = []

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts: list[str], **options):
        self.batches.append(texts)
        return self._tokenizer.encode_batch_fast(texts, **options)


@pytest.mark.parametrize(
    ("texts", "together"),
    [
        (["a" * 15] * 3, [2, 1]),
        (["a" * 40] * 2, [1, 1]),
        # Slices that do not begin their text have no batch with others.
        (["a" * 30, "ab " * 20, "a" * 10], [1, 1, 1, 1]),
        (["", "a", "\ufdfa", "a" * 30, "a" * 5], [3, 1]),
        (["", ""], []),
    ],
)
def test_texts_are_tokenized_in_batches_of_one_slice(tiny_m3: Path, texts, together) -> None:
    watched = WatchedTokenizer(Tokenizer.from_file(str(tiny_m3 / "tokenizer.json")))
    tokenizer = TextTokenizer(watched, 8192, slice_characters=40)
    watched.batches.clear()
    found = tokenizer.encode_plain(texts, 100)
    assert [len(batch) for batch in watched.batches] == together
    assert len(found) == len(texts)


def test_smallest_usable_max_length(tiny_m3: Path) -> None:
    with pytest.raises(StartupError, match="a length limit of 2 tokens leaves no room"):
        TextTokenizer.from_folder(tiny_m3, 2)
    (text,) = TextTokenizer.from_folder(tiny_m3, 3).encode(["search vector"])
    assert (len(text.ids), text.original_tokens, text.truncated) == (3, 4, True)


def test_token_ids_strings_and_special_tokens(tiny_m3: Path) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 10)
    before, after = tokenizer.special_tokens
    assert [(token.id, token.string) for token in (*before, *after)] == [(0, "<s>"), (2, "</s>")]
    assert (tokenizer.token_id("</s>"), tokenizer.token_id("<no such>")) == (2, None)
    assert tokenizer.token_strings(np.array([0, 2, 10**6])) == ["<s>", "</s>", ""]


@pytest.mark.parametrize("direction", ["left", "right", None])
def test_padding_and_truncation_in_the_file_have_no_effect(tiny_m3: Path, direction) -> None:
    in_file = Tokenizer.from_file(str(tiny_m3 / "tokenizer.json"))
    in_file.no_padding()
    if direction is not None:
        in_file.enable_padding(direction=direction, length=20)
    in_file.enable_truncation(4)
    tokenizer = TextTokenizer(in_file, 10)
    assert tokenizer.pads_left == (direction == "left")
    assert len(tokenizer.encode_plain(["search"], 100)[0].ids) == 1
    assert len(tokenizer.encode_plain(["search " * 9], 100)[0].ids) == 9


def test_text_without_a_token_becomes_token_0(tiny_m3: Path) -> None:
    bare = Tokenizer.from_file(str(tiny_m3 / "tokenizer.json"))
    bare.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    empty, word, cut = TextTokenizer(bare, 10).encode(["", "search", " " * 1000])
    assert (empty.ids.tolist(), empty.original_tokens, empty.truncated) == ([0], 1, False)
    assert (len(word.ids), word.original_tokens) == (1, 1)
    assert (cut.ids.tolist(), cut.original_tokens, cut.exact) == ([0], 2, False)


class GivenUpError(Exception):
    """The caller no longer needs the tokens."""


@pytest.mark.parametrize(
    "call",
    [
        lambda tokenizer, text: tokenizer.encode([text]),
        lambda tokenizer, text: list(tokenizer.spans(text)),
    ],
)
def test_tokenizing_stops_at_the_next_slice_when_given_up(
    tiny_m3: Path, call: Callable, monkeypatch
) -> None:
    outcomes = iter((None, None, GivenUpError))

    def stop_if_given_up() -> None:
        if (error := next(outcomes)) is not None:
            raise error

    monkeypatch.setattr(tokenizer_module, "stop_if_given_up", stop_if_given_up)
    tokenizer = TextTokenizer.from_folder(tiny_m3, 8192, slice_characters=1000)
    with pytest.raises(GivenUpError):
        call(tokenizer, "search " * 10_000)


class WithoutLockingCalls:
    """A tokenizer without the library's calls for one text, which hold the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str):
        assert name not in {"encode", "post_process"}, "the event loop would wait for it"
        return getattr(self._tokenizer, name)


def test_tokenizing_releases_the_gil(tiny_m3: Path) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 8, slice_characters=50)
    tokenizer._tokenizer = WithoutLockingCalls(tokenizer._tokenizer)
    text = "hybrid search " * 12
    (left,) = tokenizer.encode([text], "query: ", TruncationOptions(side="left"))
    assert left.truncated
    assert sum(len(part.ids) for part in tokenizer.spans(text)) == left.original_tokens - 4


VOCABULARY = {"[CLS]": 0, "[SEP]": 1, "[END]": 2, "a": 3, "b": 4, "[UNK]": 5}


def templated(single: str, pair: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(name, VOCABULARY[name]) for name in ("[CLS]", "[SEP]", "[END]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=special
    )
    return tokenizer


@pytest.mark.parametrize(
    ("single", "pair", "around", "between"),
    [
        ("$A", "$A $B:1", [[], []], [[], [], []]),
        ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [[0], [1]], [[0], [1], [1]]),
        (
            "[CLS] [SEP] $A", "[CLS] [CLS] $A [SEP] [SEP] [END] $B:1",
            [[0, 1], []], [[0, 0], [1, 1, 2], []],
        ),
        ("$A [SEP] [END]", "$A [SEP] $B:1 [SEP]:1 [END]:1", [[], [1, 2]], [[], [1], [1, 2]]),
    ],
)  # fmt: skip
def test_template_tokens_around_and_between_texts_are_found(single, pair, around, between) -> None:
    tokenizer = templated(single, pair)
    assert [part.tolist() for part in find_template(tokenizer, "a")] == around
    assert [part.tolist() for part in TextTokenizer(tokenizer, 9).pair_template()] == between


@pytest.mark.parametrize(
    ("single", "closing", "expected"),
    [
        ("[CLS] $A", None, [0, 3]),
        ("[CLS] $A", "[END]", [0, 3, 2]),
        ("[CLS] $A [SEP]", "[END]", [0, 3, 1, 2]),
        ("[CLS] $A [END]", "[END]", [0, 3, 2]),
        ("$A [END] [SEP]", "[END]", [3, 2, 1, 2]),
    ],
)
def test_closing_token_is_added_if_missing(single, closing, expected) -> None:
    tokenizer = TextTokenizer(templated(single, "$A $B"), 9, closing=closing)
    assert tokenizer.encode(["a"])[0].ids.tolist() == expected


def test_unknown_closing_token_and_changing_template_are_refused() -> None:
    tokenizer = templated("$A", "$B $A")
    with pytest.raises(StartupError, match=r"the vocabulary has no token \[NONE\]"):
        TextTokenizer(tokenizer, 9, closing="[NONE]")
    with pytest.raises(StartupError, match="changes the text itself where it adds special tokens"):
        find_template(tokenizer, "a", "b")


SIDES = st.sampled_from(["left", "right"])
PROMPTS = st.sampled_from(["query: ", "Instruct: search\nQuery:", "search", " ", "検索:", "a\n"])


@given(TEXTS | ODD | st.text(), st.integers(2, 400))
def test_slices_join_to_the_text_and_are_bounded(limited, text: str, most: int) -> None:
    sliced = limited(100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced, "_slice_characters", most)
        slices = list(sliced._slices(text))
    assert "".join(slices) == text
    assert all(0 < len(part) <= most for part in slices)


@pytest.mark.parametrize(
    ("characters", "expected"),
    [
        (11, ["ab cd ef gh"]),  # The text fits exactly.
        (8, ["ab cd ef", " gh"]),
        (7, ["ab cd", " ef gh"]),
        (1, [*"ab cd ef gh"]),  # Without such a space it is cut anywhere.
    ],
)
def test_slice_ends_before_its_last_space_between_letters(
    tiny_m3: Path, characters, expected
) -> None:
    sliced = TextTokenizer.from_folder(tiny_m3, 100, slice_characters=characters)
    assert list(sliced._slices("ab cd ef gh")) == expected


# Parts of at most 36 characters, between which a slice can end.
PARTS = st.lists(
    st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=3), max_size=20
)


@given(PARTS, st.integers(0, 60), SIDES)
@settings(max_examples=30)
def test_slices_and_truncation_do_not_change_tokens(
    tokenizer: Tokenizer, parts: list[list[tuple[str, str]]], limit: int, side: Side
) -> None:
    """Slices that end between words have the tokens of the whole text, and their offsets."""
    text = " search vector ".join("".join(map("".join, part)) for part in parts)
    tokenizer.no_truncation()
    whole = tokenizer.encode(text, add_special_tokens=False)
    characters = 9 * 120 if "\ufdfa" in text else 120
    sliced = TextTokenizer(tokenizer, 100, slice_characters=characters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "CHARACTERS_PER_TOKEN", len(text) + 1)
        patch.setattr(tokenizer_module, "_OFFSETS_AT_ONCE", 7)
        (tokens,) = sliced.encode_plain([text], limit, side)
        spans = list(sliced.spans(text))
    ids = whole.ids
    assert tokens.ids.tolist() == (ids[:limit] if side == "right" else ids[-limit:][:limit])
    assert (tokens.kept, tokens.total, tokens.exact) == (len(tokens.ids), len(ids), True)
    assert tokens.first == ids[:16]
    rows = [
        row
        for span in spans
        for row in zip(span.ids.tolist(), span.starts.tolist(), span.stops.tolist(), strict=True)
    ]
    expected = zip(ids, whole.offsets, strict=True)
    assert rows == [(token_id, start, stop) for token_id, (start, stop) in expected]


def test_no_sign_is_put_in_front_of_a_slice_or_cut_text(tokenizer: Tokenizer) -> None:
    """Slices end within words, as does a text that is cut on its left."""

    def count_signs(ids: list[int]) -> int:
        return sum(tokenizer.id_to_token(token_id).startswith(("\u2581", "Ġ")) for token_id in ids)

    sliced = TextTokenizer(tokenizer, 100, slice_characters=50)
    for text in ("検索言葉世界", "searchvector", "42"):
        long = text * 40
        (whole,) = sliced.encode_plain([long], len(long))
        assert count_signs(whole.ids.tolist()) == count_signs(ids_of(tokenizer, long))
        (cut,) = sliced.encode_plain([f"search {long}"], len(long) // 32 - 1, "left")
        assert not cut.exact
        assert count_signs(cut.first) == count_signs(cut.ids.tolist()) == 0


@given(TEXTS | ODD, st.integers(1, 12), SIDES)
@settings(max_examples=50)
def test_cut_before_the_tokenizer_changes_no_kept_token(
    tokenizer: Tokenizer, text: str, limit: int, side
) -> None:
    """Compares kept tokens if they end a word before the cut; the cut is always reported."""
    long = " search ".join([text] * 40)
    whole, most = ids_of(tokenizer, long), 32 * limit
    (tokens,) = TextTokenizer(tokenizer, 100).encode_plain([long], limit, side)
    assert tokens.exact == (len(long) <= most)
    assert tokens.total > tokens.kept or tokens.exact
    assert tokens.kept <= limit
    near = long[:most] if side == "right" else long[-most:]
    # Every tokenizer ends a word there.
    word_ends = [found.end() for found in re.finditer(r"[^\W_](?= [^\W_])", near)]
    if tokens.exact or not word_ends:
        return
    sure = near[: word_ends[-1]] if side == "right" else near[word_ends[0] :]
    if len(ids_of(tokenizer, sure)) >= limit:
        assert tokens.ids.tolist() == (whole[:limit] if side == "right" else whole[-limit:])


@pytest.mark.parametrize("side", ["left", "right"])
def test_cut_before_the_tokenizer_is_always_reported(tokenizer: Tokenizer, side: Side) -> None:
    """Even if fewer tokens than the limit remain, and if a grapheme is cut."""
    texts = [f"search{end * 5000}search" for end in (" ", "\u0301", "\u200d", "a")]
    ours, options = TextTokenizer(tokenizer, 50), TruncationOptions(side=side)
    for prompt in ("", "query: "):
        for plain in ours.encode_plain(texts, 50, side, prompt):
            assert not plain.exact
            assert plain.kept < plain.total
        for tokenized in ours.encode(texts, prompt, options):
            assert (tokenized.truncated, tokenized.exact) == (True, False)


def test_spaces_beyond_the_cut_count_as_one_token(tiny_m3: Path) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 12)
    (spaces,) = tokenizer.encode(["search" + " " * 1000])
    assert (len(spaces.ids), spaces.original_tokens, spaces.exact) == (3, 4, False)
    (fits,) = tokenizer.encode(["search" + " " * (320 - 6)])
    assert (len(fits.ids), fits.original_tokens, fits.exact) == (3, 3, True)


@given(
    st.tuples(st.just(""), TEXTS | ODD | st.text(), SIDES)
    | st.tuples(PROMPTS, TEXTS | ODD, st.just("right"))
    | st.tuples(PROMPTS, TEXTS, st.just("left")),
    st.integers(1, 30),
)
@settings(max_examples=50)
def test_prompt_is_joined_with_the_text_and_kept_by_left_truncation(
    tokenizer: Tokenizer, case: tuple[str, str, Side], limit: int
) -> None:
    prompt, text, side = case
    tokenizer.no_truncation()
    tokenizer.no_padding()
    whole = tokenizer.encode(prompt + text, add_special_tokens=False)
    ids, of_prompt = whole.ids, sum(start < len(prompt.rstrip()) for start, _ in whole.offsets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "CHARACTERS_PER_TOKEN", len(prompt + text) + 1)
        (tokens,) = TextTokenizer(tokenizer, 100).encode_plain([text], limit, side, prompt)
    begin = ids[: limit if side == "right" or len(ids) <= limit else min(of_prompt, limit)]
    assert tokens.ids.tolist() == begin + ids[len(ids) - (min(limit, len(ids)) - len(begin)) :]
    assert (tokens.total, tokens.exact) == (len(ids), True)
    assert tokens.first == ids[:16]


def test_prompt_of_several_slices_is_not_cut(tiny_m3: Path, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer_module, "CHARACTERS_PER_TOKEN", 1000)
    sliced = TextTokenizer.from_folder(tiny_m3, 100, slice_characters=40)
    prompt, text = "search vector " * 8, "history of the music " * 8
    (whole,) = sliced.encode_plain([prompt + text], 100)
    (of_prompt,) = sliced.encode_plain([prompt], 100)
    head, ids = of_prompt.total, whole.ids.tolist()
    assert (head, of_prompt.ids.tolist()) == (16, ids[:16])
    for limit in (1, head - 1, head, head + 3, len(ids) - 1, len(ids), len(ids) + 1):
        (tokens,) = sliced.encode_plain([text], limit, "left", prompt)
        begin = ids[: min(head, limit)]
        end = ids[head:][len(ids) - limit :] if limit > head else []
        assert tokens.ids.tolist() == (ids if limit >= len(ids) else begin + end), limit
        assert tokens.total == len(ids)


@pytest.mark.parametrize(
    ("side", "most", "kept_of_text"),
    [("right", 30, slice(8)), ("right", 3, slice(3)), ("left", 3, slice(-3, None))],
)
def test_special_tokens_survive_truncation_and_max_tokens(
    tiny_m3: Path, side, most, kept_of_text
) -> None:
    tokenizer, long = TextTokenizer.from_folder(tiny_m3, 10), "search vector " * 20
    whole = tokenizer.encode_plain([long], 100)[0].ids.tolist()
    (text,) = tokenizer.encode([long], truncation=TruncationOptions(side=side, max_tokens=most))
    assert text.ids.tolist() == [0, *whole[kept_of_text], 2]
    assert text.truncated
    assert text.original_tokens == 42 or not text.exact
