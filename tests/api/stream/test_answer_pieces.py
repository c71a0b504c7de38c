"""How much of a stream is computed at a time, and what its errors cost."""

import asyncio

import numpy as np
import pytest

from smart_embedder.api.formats.vectors import VectorOptions
from smart_embedder.api.stream.answer import (
    LineResult,
    Piece,
    PieceAnswer,
    PieceEmbedder,
    PieceMemory,
    PieceSize,
)
from smart_embedder.api.stream.lines import Line
from smart_embedder.engine.checks import AnswerMemory
from smart_embedder.engine.records import (
    EmbeddingResult,
    Outputs,
    TextEmbedding,
    Timings,
    TokenStrings,
    Truncation,
)
from smart_embedder.errors import (
    InferenceError,
    InferenceTimeoutError,
    InvalidRequestError,
    LoadingError,
    OutOfMemoryError,
    QueueFullError,
    UnavailableError,
)
from smart_embedder.main import create_app
from smart_embedder.settings import Settings

FORWARD = 1000


def piece(lines: int, tokens: int, seconds: float, nbytes: int) -> Piece:
    """A piece of lines of 100 bytes."""
    results = [LineResult(Line(i + 1, i, 100)) for i in range(lines)]
    return Piece(PieceAnswer(PieceMemory(1)), results, tokens, nbytes, seconds)


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
    size.observe(Piece(PieceAnswer(PieceMemory(1)), [LineResult(Line(1, 0, 100))]))
    assert size.bytes == first


NEEDED = ("the vectors", "send fewer texts")


def test_pieces_hold_no_more_together_than_one_answer_but_the_oldest_goes_on() -> None:
    memory = PieceMemory(100)
    first, second, third = (PieceAnswer(memory) for _ in range(3))
    second.need(60, *NEEDED)
    with pytest.raises(QueueFullError, match="come before"):
        third.need(60, *NEEDED)
    first.need(90, *NEEDED)
    with pytest.raises(InvalidRequestError, match="MAX_ANSWER_BYTES"):
        first.need(101, *NEEDED)
    ended = memory.freed
    first.end()
    assert ended.is_set()
    third.need(40, *NEEDED)


def test_what_a_piece_has_computed_counts_beside_what_it_computes() -> None:
    memory = PieceMemory(100)
    PieceAnswer(memory)
    piece = PieceAnswer(memory)
    piece.need(60, *NEEDED)
    piece.keep(60)
    piece.need(40, *NEEDED)
    with pytest.raises(QueueFullError):
        piece.need(41, *NEEDED)


class Texts:
    """Embeds each text as its length, or raises what is planned for a call that holds it."""

    def __init__(self, **planned) -> None:
        self.service = create_app(Settings(api_token=None)).state.service
        self.planned = {text: list(errors) for text, errors in planned.items()}
        self.calls: list[list[str]] = []
        self.held: list[int] = []
        self.embedder = PieceEmbedder(self.service, "Alice", self.embed)

    async def embed(self, texts, answer) -> EmbeddingResult:
        self.calls.append(texts)
        self.held.append(self.service.stream_slots.held_by("Alice"))
        for text in texts:
            if self.planned.get(text):
                raise self.planned[text].pop(0)
        vectors = [TextEmbedding(np.full(2, len(text), np.float32)) for text in texts]
        answer.need(8 * len(texts), *NEEDED)
        cuts = [Truncation("sentences", i, "m", 4, 9) for i, t in enumerate(texts) if "cut" in t]
        timings = Timings(tokenize=0, queue=0, inference=0.5, total=1)
        return EmbeddingResult(vectors, cuts, 3 * len(texts), timings)

    async def piece(self, *texts: str | Exception) -> Piece:
        """Texts as lines from number 1; an error is a line that holds none."""
        lines = [
            Line(i, f"id {i}", 10, each) if isinstance(each, str) else Line(i, i, 10, error=each)
            for i, each in enumerate(texts, 1)
        ]
        piece = await self.embedder.embed(lines, PieceAnswer(PieceMemory(1000)))
        assert [each.line for each in piece.results] == lines
        assert self.service.stream_slots.held == 0
        assert set(self.held) <= {1}
        return piece

    @property
    def counted(self) -> float:
        return self.service.metrics.sentences._value.get()


def outcomes(piece: Piece) -> list[object]:
    """The number in each vector, or the error."""
    return [each.error or each.embedding.dense[0] for each in piece.results]


async def test_lines_that_hold_no_text_keep_their_places_and_cost_no_forward() -> None:
    texts, bad = Texts(), InvalidRequestError("no text")
    piece = await texts.piece(bad, "a", bad, "bcd", bad)
    assert outcomes(piece) == [bad, 1, bad, 3, bad]
    assert texts.calls == [["a", "bcd"]]
    assert (piece.tokens, piece.nbytes, piece.seconds, texts.counted) == (6, 16, 0.5, 2)


async def test_only_bad_lines_ask_for_nothing() -> None:
    texts, bad = Texts(), InvalidRequestError("no text")
    assert outcomes(await texts.piece(bad, bad)) == [bad, bad]
    assert texts.calls == []


async def test_what_was_cut_is_told_of_its_own_line() -> None:
    piece = await Texts().piece("a", InvalidRequestError("no text"), "cut", "b", "cut too")
    assert [len(each.truncations) for each in piece.results] == [0, 0, 1, 0, 1]


@pytest.mark.parametrize("error", [OutOfMemoryError, InferenceError, InvalidRequestError])
async def test_an_error_that_one_text_causes_is_that_texts_alone(error) -> None:
    bad = [error(f"the {i}. time") for i in range(9)]
    texts = Texts(worse=bad)
    piece = await texts.piece("a", "bb", "worse", "dddd", "eeeee")
    assert outcomes(piece) == [1, 2, bad[2], 4, 5]
    assert [len(call) for call in texts.calls] == [5, 2, 3, 1, 2]
    assert (piece.tokens, piece.nbytes, piece.seconds) == (12, 32, 1.0)
    assert texts.counted == 4


async def test_after_a_timeout_no_halves_are_tried() -> None:
    late = InferenceTimeoutError("late")
    texts = Texts(a=[late])
    assert outcomes(await texts.piece("a", "b")) == [late, late]
    assert len(texts.calls) == 1


async def test_a_service_that_cannot_go_on_ends_the_piece() -> None:
    texts = Texts(a=[UnavailableError("the device has failed")])
    with pytest.raises(UnavailableError, match="the device"):
        await texts.piece("a", "b")
    assert (len(texts.calls), texts.service.stream_slots.held) == (1, 0)


@pytest.mark.parametrize(
    ("error", "pause"),
    [
        (QueueFullError("full"), 1),
        (QueueFullError("full", retry_after=7), 7),
        (LoadingError("it is loaded again", retry_after=3), 3),
    ],
)
async def test_while_there_is_no_place_it_waits_as_long_as_it_is_told(
    error, pause, monkeypatch
) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append((seconds, texts.service.stream_slots.held))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    texts = Texts(a=[error, error])
    assert outcomes(await texts.piece("a")) == [1]
    assert pauses == [(pause, 0)] * 2


async def test_without_room_it_goes_on_when_a_piece_before_it_is_sent() -> None:
    texts, memory = Texts(), PieceMemory(20)
    first, second = PieceAnswer(memory), PieceAnswer(memory)
    first.need(16, *NEEDED)
    lines = [Line(1, 0, 10, "a")]
    waiting = asyncio.ensure_future(texts.embedder.embed(lines, second))
    for _ in range(3):
        await asyncio.sleep(0)
    assert (len(texts.calls), texts.service.stream_slots.held, waiting.done()) == (1, 0, False)
    first.end()
    assert outcomes(await waiting) == [1]
    assert len(texts.calls) == 2


def test_a_line_without_a_result_is_told_by_its_number() -> None:
    failed = LineResult(Line(7, "its id", 10), error=InvalidRequestError("no text")).record(None, 9)
    assert (failed.id, failed.error["line"], failed.error["code"]) == (
        "its id",
        7,
        "invalid_request",
    )
    lost = LineResult(Line(8, 3, 10)).record(None, 9)
    assert (lost.id, lost.error["line"]) == (3, 8)


def made(cuts: tuple[Truncation, ...] = ()) -> LineResult:
    colbert = np.ones((8, 4), np.float32)
    embedding = TextEmbedding(np.ones(4, np.float32), None, colbert)
    return LineResult(Line(7, "its id", 10, "a"), embedding, TokenStrings(None, ["a"] * 8), cuts)


def test_a_record_holds_what_is_made_of_the_vectors_and_which_line_was_cut() -> None:
    options = VectorOptions(Outputs(dense=True, colbert=True), "int8")
    cut = Truncation("sentences", 3, "m", 4, 9)
    record = made((cut,)).record(options, 1 << 20)
    assert (record.id, record.error) == ("its id", None)
    assert record.vectors.dense.values.dtype == np.int8
    assert record.vectors.colbert.values.shape == (8, 4)
    assert record.vectors.tokens == TokenStrings(None, ["a"] * 8)
    (warning,) = record.warnings
    assert warning["target"] == {"field": "text", "index": 6, "pointer": "/text"}
    assert warning["details"]["original_tokens"] == 9


def test_what_post_processing_takes_too_much_for_is_that_lines_error() -> None:
    options = VectorOptions(Outputs(colbert=True), pool_factor=2)
    memory = AnswerMemory()
    options.hold([made().embedding], memory)
    needed = memory.held
    assert made().record(options, needed).vectors.colbert.values.shape[0] < 8
    refused = made().record(options, needed - 1)
    assert (refused.id, refused.vectors, refused.error["line"]) == ("its id", None, 7)
    assert refused.error["code"] == "invalid_request"
    assert "leave out colbert_pool_factor" in refused.error["detail"]
