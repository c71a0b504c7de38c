"""An enormous text tokenised in pieces has the tokens that it has as a whole."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.models.pieces import pieces_of
from app.models.tokenizer import TextTokenizer

WORDS = ["search", "the", "naïve", "Straße", "42", "7", "a.", "(b", "検索", "é", "<mask>", "</s>"]
GAPS = [" ", "  ", "\n", "\t ", "\u3000", " \u0301", ""]
TEXTS = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), max_size=60).map(
    lambda parts: "".join(word + gap for word, gap in parts)
)


@pytest.fixture(scope="session", params=["tiny_m3", "tiny_qwen", "demo_checkpoint"])
def folder(request) -> Path:
    """SentencePiece's words, Qwen's bytes, BERT's word pieces."""
    return request.getfixturevalue(request.param)


@given(TEXTS, st.integers(1, 40))
def test_the_tokens_are_those_of_the_whole_text(folder: Path, text: str, characters: int) -> None:
    whole = TextTokenizer.from_folder(folder, 8192)
    in_pieces = TextTokenizer.from_folder(folder, 8192, piece_characters=characters)
    (expected,), (found,) = whole.encode([text]), in_pieces.encode([text])
    np.testing.assert_array_equal(found.ids, expected.ids)
    assert found.original_tokens == expected.original_tokens


@given(st.text(), st.integers(1, 40))
def test_the_pieces_are_the_text(text: str, characters: int) -> None:
    pieces = list(pieces_of(text, characters))
    assert "".join(pieces) == text
    assert all(piece.startswith(" ") for piece in pieces[1:])
    assert all(len(piece) >= characters for piece in pieces[:-1])


def test_a_text_without_a_border_is_one_piece() -> None:
    assert list(pieces_of("x" * 100, 10)) == ["x" * 100]


def test_long_and_short_texts_keep_their_places(tiny_m3: Path) -> None:
    tokenizer = TextTokenizer.from_folder(tiny_m3, 8192, piece_characters=8)
    texts = ["music", "history of the music", "", "search vector search"]
    together = tokenizer.encode_plain(texts)
    for text, ids in zip(texts, together, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode_plain([text])[0])
