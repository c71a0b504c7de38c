"""How much of a stream is computed at a time."""

from app.api.streams.lines import Line
from app.api.streams.pieces import LineResult, Piece, PieceSize

FORWARD = 1000


def piece(lines: int, tokens: int, seconds: float, nbytes: int) -> Piece:
    """A piece of lines of 100 bytes."""
    results = [LineResult(Line(i + 1, i, 100)) for i in range(lines)]
    return Piece(results, tokens, nbytes, seconds)


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
    size.observe(Piece([LineResult(Line(1, 0, 100))]))
    assert size.bytes == first
