"""Texts cut from either side, behind a prompt, and counted no further than makes sense.

The reference is the whole text tokenised at once, and cut.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from smart_embedder.engine.records import TruncationOptions
from smart_embedder.models.text import tokenizer as tokenizer_module
from smart_embedder.models.text.tokenizer import TextTokenizer, TruncatedTokens
from tests.models.text.test_slices import ODD, TEXTS, ids_of, qwen_words
from tests.models.text.test_tokenizer import WatchedTokenizer

PROMPTS = st.sampled_from(["query: ", "Instruct: search\nQuery:", "search", " ", "検索:", "a\n"])


@pytest.fixture(scope="module", params=["tiny_m3", "tiny_qwen", "qwen's words", "demo_checkpoint"])
def tokenizer(request) -> Tokenizer:
    """SentencePiece's words, GPT-2's, Qwen's, BERT's word pieces."""
    if request.param == "qwen's words":
        return qwen_words(request.getfixturevalue("tiny_qwen"))
    folder: Path = request.getfixturevalue(request.param)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def kept(tokens: TruncatedTokens) -> list[int]:
    ids: list[int] = tokens.ids.tolist()
    return ids


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("parts", [[], [[]], [[1, 2, 3], [4], [], [5, 6]], [[*range(40)], [40]]])
def test_what_comes_in_parts_is_cut_and_counted_as_a_whole(parts: list[list[int]], side) -> None:
    whole = [each for part in parts for each in part]
    for limit in range(len(whole) + 2):
        tokens = TruncatedTokens(limit, side)
        for part in parts if side == "right" else reversed(parts):
            tokens.add(part)
        expected = whole[:limit] if side == "right" else whole[max(0, len(whole) - limit) :]
        assert kept(tokens) == kept(tokens) == expected
        assert (tokens.kept, tokens.total) == (len(expected), len(whole))
        assert (tokens.first, tokens.last) == (whole[:16], whole[-16:])
        begun = TruncatedTokens(limit, side, _parts=[tokens.ids])
        begun.begin_with([7, 8])
        assert kept(begun) == [7, 8][:limit] + expected[2:]
        assert tokens.take(np.array([98]), np.array([99])).tolist() == [98, *expected, 99]


@pytest.mark.parametrize(("counted", "total"), [(3, 8), (4, 10)])
def test_tokens_are_counted_so_far_beyond_the_limit_and_no_further(
    tiny_m3: Path, monkeypatch, counted: int, total: int
) -> None:
    """In slices of two tokens, of which the next one stands ready when the last is counted."""
    monkeypatch.setattr(tokenizer_module, "COUNTED_TOKENS", counted)
    tokenizer = TextTokenizer.from_folder(tiny_m3, 100, slice_characters=14)
    (tokens,) = tokenizer.encode_plain(["search" + " search" * 20], 3)
    assert (tokens.total, tokens.exact) == (total, False)


@given(TEXTS | ODD | st.text(), st.integers(1, 12))
def test_a_text_cut_from_the_left_keeps_the_end_of_the_whole_texts_tokens(
    tokenizer: Tokenizer, text: str, limit: int
) -> None:
    whole = ids_of(tokenizer, text)
    (tokens,) = TextTokenizer(tokenizer, 100).encode_plain([text], limit, "left")
    assert kept(tokens) == whole[-limit:]
    assert (tokens.total, tokens.exact) == (len(whole), True)
    assert (tokens.first, tokens.last) == (whole[:16], whole[-16:])


@given(TEXTS, st.integers(1, 60), st.sampled_from(["left", "right"]), st.integers(0, 40))
@settings(max_examples=60)
def test_where_counting_ends_no_token_that_is_read_changes(
    tokenizer: Tokenizer, text: str, limit: int, side, counted: int
) -> None:
    long = " search vector ".join([text] * 6)
    whole = ids_of(tokenizer, long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "COUNTED_TOKENS", counted)
        sliced = TextTokenizer(tokenizer, 100, slice_characters=18 * (len(text) + 40))
        (tokens,) = sliced.encode_plain([long], limit, side)
    assert kept(tokens) == (whole[:limit] if side == "right" else whole[-limit:])
    if tokens.exact:
        assert tokens.total == len(whole)
        assert (tokens.first, tokens.last) == (whole[:16], whole[-16:])
    else:
        assert limit + counted <= tokens.total <= len(whole)


@given(PROMPTS, TEXTS | ODD, st.integers(1, 30))
def test_a_prompt_and_its_text_are_read_as_one_text(
    tokenizer: Tokenizer, prompt: str, text: str, limit: int
) -> None:
    whole = ids_of(tokenizer, prompt + text)
    (tokens,) = TextTokenizer(tokenizer, 100).encode_plain([text], limit, "right", prompt)
    assert (kept(tokens), tokens.total) == (whole[:limit], len(whole))


@given(PROMPTS, TEXTS, st.integers(1, 30))
def test_a_cut_from_the_left_leaves_the_prompt(
    tokenizer: Tokenizer, prompt: str, text: str, limit: int
) -> None:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    whole = tokenizer.encode(prompt + text, add_special_tokens=False)
    head = sum(start < len(prompt.rstrip()) for start, _ in whole.offsets)
    (tokens,) = TextTokenizer(tokenizer, 100).encode_plain([text], limit, "left", prompt)
    assert tokens.total == len(whole.ids)
    if len(whole.ids) <= limit:
        assert kept(tokens) == whole.ids
    else:
        begun = whole.ids[: min(head, limit)]
        assert kept(tokens) == begun + whole.ids[len(whole.ids) - (limit - len(begun)) :]


def test_a_prompt_of_several_slices_is_left_whole(tiny_m3: Path) -> None:
    sliced = TextTokenizer.from_folder(tiny_m3, 100, slice_characters=40)
    prompt, text = "search vector " * 8, "history of the music " * 8
    (whole,) = sliced.encode_plain([prompt + text], 100)
    (of_prompt,) = sliced.encode_plain([prompt], 100)
    head, ids = of_prompt.total, kept(whole)
    assert (head, kept(of_prompt)) == (16, ids[:16])
    for limit in (1, head - 1, head, head + 3, len(ids) - 1, len(ids), len(ids) + 1):
        (tokens,) = sliced.encode_plain([text], limit, "left", prompt)
        begun = ids[: min(head, limit)]
        end = ids[head:][len(ids) - limit :] if limit > head else []
        assert kept(tokens) == (ids if limit >= len(ids) else begun + end), limit
        assert tokens.total == len(ids)
    # What follows the prompt is not read a second time.
    watched = WatchedTokenizer(Tokenizer.from_file(str(tiny_m3 / "tokenizer.json")))
    TextTokenizer(watched, 100, slice_characters=40).encode_plain([text], 20, "left", prompt)
    assert len(watched.singles) == 4 < len(watched.batches)
    assert "".join(each for (each,) in watched.singles).startswith(prompt.rstrip())


@pytest.mark.parametrize("side", ["left", "right"])
def test_special_tokens_stay_on_both_sides(tiny_m3: Path, side) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 10)
    whole = tokenizer.encode_plain(["search vector " * 20], 100)[0].ids.tolist()
    (text,) = tokenizer.encode(["search vector " * 20], truncation=TruncationOptions(side=side))
    assert text.ids.tolist() == [0, *(whole[:8] if side == "right" else whole[-8:]), 2]
    assert (text.original_tokens, text.truncated, text.exact) == (42, True, True)


def test_a_lower_limit_of_one_request_counts_no_special_tokens(tiny_m3: Path) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 10)
    limit = TruncationOptions(max_tokens=3)
    (text,) = tokenizer.encode(["search vector " * 20], truncation=limit)
    assert (len(text.ids), text.original_tokens) == (5, 42)
    (text,) = tokenizer.encode(["search vector " * 20], truncation=TruncationOptions(max_tokens=30))
    assert (len(text.ids), text.original_tokens) == (10, 42)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_of_five_megabytes_is_counted_to_a_lower_bound(tiny_m3: Path, side) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 512)
    words = ["search", "vector", "history"]
    text = " ".join(words[i % 3] for i in range(700_000))
    (tokens,) = tokenizer.encode_plain([text], 510, side)
    assert not tokens.exact
    assert 510 + 65_536 <= tokens.total < 100_000
    near = text[:4000] if side == "right" else text[text.index(" ", len(text) - 8000) :]
    (short,) = tokenizer.encode_plain([near], 510, side)
    assert kept(tokens) == kept(short)


def test_a_long_texts_neighbours_are_counted_to_their_ends(tiny_m3: Path) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 512)
    texts = ["music", "search " * 200_000, "history of the music", "vector " * 20_000]
    together = tokenizer.encode(texts)
    alone = [tokenizer.encode([text])[0] for text in texts]
    assert [text.exact for text in together] == [True, False, True, True]
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist()
    assert together[3].original_tokens == 20_002
