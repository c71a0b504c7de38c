"""Tokenisation: equal to transformers' own, cut exactly, counted exactly."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from app.errors import StartupError
from app.models.text.tokenizer import TextTokenizer
from tests.support.texts import varied_texts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@pytest.fixture(scope="module")
def theirs(tiny_m3: Path):
    return AutoTokenizer.from_pretrained(tiny_m3)


@pytest.fixture(scope="module")
def ours(tiny_m3: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(tiny_m3, 8192)


def test_ids_are_those_of_transformers(ours, theirs) -> None:
    texts = varied_texts(200)
    expected = theirs(texts, truncation=True, max_length=8192)["input_ids"]
    assert [text.ids.tolist() for text in ours.encode(texts)] == expected


@given(text=TEXT, limit=st.integers(3, 20))
@settings(max_examples=200)
def test_any_text_is_cut_as_transformers_cuts_it(tiny_m3: Path, theirs, text, limit) -> None:
    tokenized = TextTokenizer.from_folder(tiny_m3, limit).encode([text])[0]
    assert tokenized.ids.tolist() == theirs(text, truncation=True, max_length=limit)["input_ids"]
    assert tokenized.original_tokens == len(theirs(text)["input_ids"])
    assert tokenized.truncated == (tokenized.original_tokens > limit)


@pytest.mark.parametrize(("words", "truncated"), [(7, False), (8, False), (9, True)])
def test_counts_are_exact_around_the_limit(tiny_m3: Path, words: int, truncated: bool) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 10)
    text = tokenizer.encode([" ".join(["search"] * words)])[0]
    assert text.original_tokens == words + 2
    assert text.truncated == truncated
    assert len(text.ids) == min(words + 2, 10)
    assert (text.ids[0], text.ids[-1]) == (0, 2)


@given(text=TEXT, limit=st.integers(3, 20), characters=st.integers(20, 60))
@settings(max_examples=50)
def test_counts_are_exact_over_many_slices(tiny_m3: Path, text, limit, characters) -> None:
    long = " search".join([text] * 8)
    whole = TextTokenizer.from_folder(tiny_m3, limit).encode([long])[0]
    sliced = TextTokenizer.from_folder(tiny_m3, limit, slice_characters=characters * 18)
    found = sliced.encode([long])[0]
    assert found.original_tokens == whole.original_tokens
    assert found.ids.tolist() == whole.ids.tolist()


def test_a_limit_that_leaves_no_room_for_text_stops_the_start(tiny_m3: Path) -> None:
    with pytest.raises(StartupError, match="a length limit of 2 tokens leaves no room"):
        TextTokenizer.from_folder(tiny_m3, 2)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"holds no tokenizer\.json"):
        TextTokenizer.from_folder(tmp_path, 10)


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(StartupError, match=r"tokenizer\.json cannot be read"):
        TextTokenizer.from_folder(tmp_path, 10)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny_m3: Path, tmp_path) -> None:
    config = json.loads((tiny_m3 / "config.json").read_text())
    shutil.copy(tiny_m3 / "tokenizer.json", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 20}))
    with pytest.raises(StartupError, match=r"tokens, and the model only 20: they are not of one"):
        TextTokenizer.from_folder(tmp_path, 10)
