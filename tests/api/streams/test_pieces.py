"""How much of a stream is computed at a time."""

import pytest

from app.api.streams.lines import Line
from app.api.streams.pieces import LineResult, Piece, PieceMemory, PieceSize
from app.errors import InvalidRequestError, QueueFullError

FORWARD = 1000


def piece(lines: int, tokens: int, seconds: float, nbytes: int) -> Piece:
    """A piece of lines of 100 bytes."""
    results = [LineResult(Line(i + 1, i, 100)) for i in range(lines)]
    return Piece(results, PieceMemory(1).begin(), tokens, nbytes, seconds)


def settled(*pieces: Piece) -> int:
    size = PieceSize(FORWARD)
    for _ in range(20):
        for each in pieces:
            size.observe(each)
    return size.bytes


def test_a_piece_has_the_tokens_of_a_forward() -> None:
    # 20 tokens a line, and a second for a forward.
    assert settled(piece(100, 2000, 2.0, 1000)) == 50 * 100


def test_where_forwards_are_quick_a_piece_has_those_of_several() -> None:
    # A millisecond for a forward: a tenth of a second are 100 forwards.
    assert settled(piece(50, 1000, 0.001, 50)) == 100 * 50 * 100


def test_vectors_that_are_large_keep_a_piece_small() -> None:
    assert settled(piece(50, 1000, 0.001, 1 << 30)) == 50 * 100


def test_one_piece_changes_the_size_by_a_factor_of_two_at_most() -> None:
    size = PieceSize(FORWARD)
    first = size.bytes
    size.observe(piece(500, 1, 1.0, 1))
    assert size.bytes == 2 * first
    size.observe(piece(1, 500, 1.0, 1))
    size.observe(piece(1, 500, 1.0, 1))
    assert size.bytes == first // 2


def test_a_piece_of_errors_says_nothing() -> None:
    size = PieceSize(FORWARD)
    first = size.bytes
    size.observe(Piece([LineResult(Line(1, 0, 100))], PieceMemory(1).begin()))
    assert size.bytes == first


NEEDED = ("the vectors", "send fewer texts")


def test_pieces_hold_no_more_together_than_one_answer_but_the_oldest_goes_on() -> None:
    memory = PieceMemory(100)
    first, second, third = (memory.begin() for _ in range(3))
    second.need(60, *NEEDED)
    with pytest.raises(QueueFullError, match="come before"):
        third.need(60, *NEEDED)
    first.need(90, *NEEDED)
    with pytest.raises(InvalidRequestError, match="MAX_ANSWER_BYTES"):
        first.need(101, *NEEDED)
    ended = third.next_end()
    first.end()
    assert ended.is_set()
    third.need(40, *NEEDED)


def test_what_a_piece_has_computed_counts_beside_what_it_computes() -> None:
    memory = PieceMemory(100)
    memory.begin()
    piece = memory.begin()
    piece.need(60, *NEEDED)
    piece.keep(60)
    piece.need(40, *NEEDED)
    with pytest.raises(QueueFullError):
        piece.need(41, *NEEDED)
