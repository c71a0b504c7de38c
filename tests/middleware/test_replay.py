"""Answered requests are written to REPLAY_LOG: all of them, nothing else, and never at a cost."""

import base64
import errno
import json
import os
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from smart_embedder.api.context import context_of
from smart_embedder.engine.scheduling.fairness import LoopTurns
from smart_embedder.errors import StartupError
from smart_embedder.middleware import replay
from smart_embedder.middleware.body import LimitBody
from smart_embedder.middleware.replay import LogForReplay, ReplayLog
from smart_embedder.observability.metrics import LEFT_OUT, Metrics
from tests.middleware.exchange import exchange

BODY = b'{"sentences": ["\xc3\xa4"]}'


class Answering:
    """The app inside: reads the body, and answers."""

    def __init__(self, *answer: bytes, status: int = 200, fails: bool = False) -> None:
        self.answer, self.status, self.fails = answer or (b'{"data": []}',), status, fails

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        context = context_of(scope)
        context.vector_spaces, context.precisions = {"dense": "id"}, {"dense": "float32/a"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        for each in self.answer:
            await send({"type": "http.response.body", "body": each, "more_body": True})
        if self.fails:
            raise ConnectionError
        await send({"type": "http.response.body", "body": b""})


class Log:
    """A log in a folder, and what it counted."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20) -> None:
        self.path, self.metrics = folder / "replay.jsonl", Metrics()
        self.log = ReplayLog(self.path, max_bytes, self.metrics.replay_left_out)

    @property
    def left_out(self) -> dict[str, float]:
        name = "embedder_replay_log_left_out_total"
        counts = {reason: self.metrics.value(name, reason=reason) for reason in LEFT_OUT}
        return {reason: count for reason, count in counts.items() if count}

    async def take(self, *body: bytes, app: Any = None, **options: Any) -> None:
        """Let a request pass it."""
        await exchange(LogForReplay(app or Answering(), self.log), *(body or [BODY]), **options)

    def lines(self, path: Path | None = None) -> list[dict[str, Any]]:
        """What it has written in the end; nothing is held any more."""
        self.log.close()
        assert self.log._held == 0  # No other way to see it.
        return [json.loads(each) for each in (path or self.path).read_text().splitlines() if each]


def modes_and_sizes(folder: Path) -> tuple[list[int], bool]:
    """The modes of its files, and whether none has more than 1,000 bytes."""
    found = [each.stat() for each in folder.iterdir()]
    return [each.st_mode & 0o777 for each in found], all(each.st_size <= 1000 for each in found)


def answer_in(line: dict[str, Any]) -> bytes:
    assert line["answer"]["encoding"] == "gzip"
    packed = b"".join(map(base64.b64decode, line["answer"]["data"]))
    return zlib.decompress(packed, wbits=31)


async def test_a_line_has_all_that_is_needed_to_repeat_a_request(tmp_path: Path) -> None:
    log = Log(tmp_path)
    headers = [(b"accept", b"application/json"), (b"authorization", b"Bearer top-secret-token")]
    headers += [(b"x-request-id", b"mine"), (b"cookie", b"crumbs"), (b"if-vector-space", b"id")]
    await log.take(
        BODY[:17], BODY[17:], app=Answering(b"12", b"3"), headers=headers, query_string=b"key=k"
    )
    (line,) = log.lines()
    assert answer_in(line) == b"123"
    assert line["answer"]["type"] == "application/json"
    assert line.pop("time") > "2026"
    del line["answer"]
    assert line.pop("version")
    assert line == {
        "request_id": "mine",
        "path": "/embeddings/",
        "headers": {"accept": "application/json", "if-vector-space": "id"},
        "status": 200,
        "vector_space": {"dense": "id"},
        "precision": {"dense": "float32/a"},
        "left_out": {},
        "body": BODY.decode(),
    }
    assert log.path.stat().st_mode & 0o777 == 0o600
    assert log.left_out == {}


@pytest.mark.parametrize(
    ("app", "options"),
    [
        pytest.param(Answering(status=422), {}, id="refused"),
        pytest.param(Answering(), {"path": "/embeddings/stream"}, id="a stream"),
        pytest.param(Answering(), {"path": "/health", "method": "GET"}, id="no work"),
        pytest.param(Answering(), {"state": {"is_closing": lambda: True}}, id="the client left"),
    ],
)
async def test_what_is_not_answered_with_vectors_is_not_written(tmp_path, app, options) -> None:
    log = Log(tmp_path)
    await log.take(app=app, **options)
    assert log.lines() == []
    assert log.left_out == {}


async def test_an_answer_that_fails_midway_is_not_written(tmp_path: Path) -> None:
    log = Log(tmp_path)
    with pytest.raises(ConnectionError):
        await log.take(app=Answering(fails=True))
    assert log.lines() == []


async def test_a_packed_body_is_written_as_it_is_unpacked(tmp_path: Path) -> None:
    log, packed = Log(tmp_path), zlib.compress(BODY, wbits=31)
    app = LimitBody(LogForReplay(Answering(), log.log), 1000, LoopTurns())
    await exchange(app, packed, headers=[(b"content-encoding", b"gzip")])
    assert [each["body"] for each in log.lines()] == [BODY.decode()]


async def test_a_body_with_the_token_of_its_request_is_left_out(tmp_path: Path) -> None:
    log, body = Log(tmp_path), b'{"sentences": ["a"], "api_key": "top-secret-token"}'
    for token in (b"Bearer top-secret-token", b"top-secret-token", b"Bearer none"):
        await log.take(body, headers=[(b"authorization", token)])
    lines = log.lines()
    assert [each["body"] for each in lines] == [None, None, body.decode()]
    assert [each["left_out"] for each in lines] == [{"body": "token"}] * 2 + [{}]
    assert log.left_out == {"token": 2}


async def test_what_is_too_large_is_left_out_and_told(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(replay, "_MOST_BODY_BYTES", 10)
    monkeypatch.setattr(replay, "_MOST_ANSWER_BYTES", 20)
    log = Log(tmp_path)
    await log.take(b"1" * 6, b"2" * 5, b"3", app=Answering(b"4" * 20))
    await log.take(b"1" * 10, app=Answering(b"4" * 20, b"5"))
    first, second = log.lines()
    assert (first["body"], answer_in(first)) == (None, b"4" * 20)
    assert (second["body"], second["answer"]) == ("1" * 10, None)
    assert [each["left_out"] for each in (first, second)] == [{"body": "size"}, {"answer": "size"}]
    assert log.left_out == {"size": 2}


async def test_what_waits_holds_limited_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(replay, "_MOST_HELD_BYTES", len(BODY) + 5)
    log = Log(tmp_path)
    await log.take(app=Answering(b"123456"))
    (line,) = log.lines()
    assert (line["body"], line["answer"]) == (BODY.decode(), None)
    assert line["left_out"] == {"answer": "memory"}
    assert log.left_out == {"memory": 1}


async def test_the_file_is_bounded_and_one_old_one_is_kept(tmp_path: Path) -> None:
    log = Log(tmp_path, max_bytes=1000)
    for number in range(7):
        await log.take(b"%d" % number, headers=[(b"x-request-id", b"%d" % number)])
    await log.take(b"x" * 1000)
    names = [each["request_id"] for each in log.lines(tmp_path / "replay.jsonl.1") + log.lines()]
    assert names == [*"0123456"][-len(names) :]
    assert 3 <= len(names) < 7
    assert modes_and_sizes(tmp_path) == ([0o600, 0o600], True)
    assert log.left_out == {"size": 1}


async def test_the_next_process_goes_on_after_half_a_line(tmp_path: Path) -> None:
    (tmp_path / "replay.jsonl").write_text('{"half')
    (tmp_path / "replay.jsonl").chmod(0o644)
    log = Log(tmp_path)
    await log.take()
    log.log.close()
    half, line = log.path.read_text().splitlines()
    assert (half, json.loads(line)["body"]) == ('{"half', BODY.decode())
    assert log.path.stat().st_mode & 0o777 == 0o600


class Filling(FileIO):
    """A file on a disk that is full for requests of one name, and slow for the rest."""

    def write(self, data: Any) -> int:
        super().write(bytes(data[:10]))
        if b'"full"' in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return 10


async def test_a_full_disk_is_one_warning_and_a_counter_and_no_half_line(tmp_path, monkeypatch):
    monkeypatch.setattr(replay, "FileIO", Filling)
    log = Log(tmp_path)
    with capture_logs() as logs:
        for name in (b"1", b"full", b"full", b"4", b"full"):
            await log.take(headers=[(b"x-request-id", name)])
        assert [each["request_id"] for each in log.lines()] == ["1", "4"]
    assert [each["event"] for each in logs] == ["replay_log_not_written"] * 2
    assert "No space left on device" in logs[0]["reason"]
    assert log.left_out == {"disk": 3}


def test_a_path_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "no" / "file", "No such file or directory"),
        (tmp_path, "it is no file"),
        (Path(os.devnull), "it is no file"),
    ):
        with pytest.raises(StartupError, match=f"REPLAY_LOG={path} cannot be written: {reason}"):
            ReplayLog(path, 1000, Metrics().replay_left_out)
