"""Streams whose clients stop, leave or send too much, and what goes wrong while they run."""

import json
import threading
from contextlib import suppress

import pytest

from tests.faults.tally import tally
from tests.support.server import RunningServer
from tests.support.streaming import NDJSON, Stream

PATH = "/embeddings/stream"
SENTENCES = "embedding_sentences_processed_total"
FORWARDS = "embedding_batch_size_count"
# About 70 kB of ColBERT vectors in JSON each.
LONG = "search vector " * 50


def lines(count: int, text: str = "search vector") -> bytes:
    return b"".join(json.dumps({"id": i, "text": text}).encode() + b"\n" for i in range(count))


class Sender(threading.Thread):
    """Sends a body without reading."""

    def __init__(self, stream: Stream, content: bytes) -> None:
        super().__init__(daemon=True)
        self._stream, self._content = stream, content
        self.start()

    def run(self) -> None:
        with suppress(OSError):  # The test has closed it.
            for start in range(0, len(self._content), 65_536):
                self._stream.send(self._content[start : start + 65_536])
            self._stream.end()


def wait_until_still(server: RunningServer) -> float:
    """Wait until nothing is computed any more; how many sentences were."""
    pause, seen = threading.Event(), [-1.0]
    while len(seen) < 12 or len(set(seen[-10:])) > 1 or seen[-1] == 0:
        pause.wait(0.1)
        seen.append(server.metric(SENTENCES))
    return seen[-1]


def test_a_reader_that_stops_stops_the_computing_and_costs_nobody_else(server) -> None:
    """It then reads on, and misses nothing."""
    # Four pieces are in work. On a quick machine each grows to 4 MiB of vectors, about 150 lines.
    count, before = 1600, server.metric(SENTENCES)
    with tally(server) as counts, server.client() as client:
        options = {"return_colbert": "true"}
        with Stream(server, options, receive_buffer=4096) as stream:
            sender = Sender(stream, lines(count, LONG))
            assert wait_until_still(server) < before + count / 2
            answer = counts.ask(client)
            assert answer is not None
            assert answer.status_code == 200
            found = [stream.record()["id"] for _ in range(count)]
            sender.join()
            assert stream.rest() == []
        assert found == list(range(count))


def test_a_client_that_reads_only_when_it_has_sent_everything_is_answered(server) -> None:
    """Its body is as long as another body may be, its answer larger than any buffer."""
    count = 300
    with server.client() as client:
        answer = client.post(PATH, content=lines(count, LONG), headers={"Content-Type": NDJSON})
    found = [json.loads(line)["id"] for line in answer.content.splitlines()]
    assert found == list(range(count))
    assert len(answer.content) > 10_000_000


def test_one_that_never_reads_is_told_so_once_it_has_sent_everything(impatient) -> None:
    """Its body is longer than what is read ahead and what the system's buffers hold, so it has been
    sent only once the stream has ended.
    """
    with Stream(impatient, {"return_colbert": "true"}, receive_buffer=4096) as stream:
        sender = Sender(stream, lines(40_000, LONG))
        sender.join()
        *found, last = stream.rest()
    assert [each["id"] for each in found] == list(range(len(found)))
    assert "id" not in last
    assert (last["error"]["status"], last["error"]["code"]) == (408, "answer_not_taken")


@pytest.mark.parametrize("count", [2000, 60_000])
def test_nothing_is_computed_for_a_client_that_has_left(faulty_server, open_gate, count) -> None:
    """Whether its whole body has arrived, or nothing more of it was being read."""
    with faulty_server(FAULTS="1:hold") as server:
        with Stream(server) as stream:
            sender = Sender(stream, lines(count, "search vector " * 10))
            # The first forward has been taken, and more waits behind it.
            server.wait_for_more(lambda: server.metric("embedder_queue_wait_seconds_count"), 0)
            server.wait_for_more(lambda: server.metric("embedding_queue_size"), 1)
            stream.hang_up()
            sender.join()
        server.wait_for_metric("embedder_abandoned_requests_total", 1)
        assert server.metric("embedding_queue_size") == 0
        open_gate()
        with server.client() as client:
            assert client.post("/embeddings/", json={"sentences": ["a"]}).status_code == 200
        assert server.metric(FORWARDS) == 2


def test_at_sigterm_a_stream_ends_with_one_clear_record(serve) -> None:
    with serve() as server:
        with Stream(server) as stream:
            stream.send_texts("a", "b")
            assert [stream.record()["id"] for _ in range(2)] == [0, 1]
            server.process.terminate()
            (last,) = stream.rest()
        assert (last["error"]["status"], last["error"]["code"]) == (503, "draining")
        assert last["error"]["retry_after"] == 5
        assert server.process.wait(30) == 0


def test_a_stream_may_take_longer_than_a_request_and_its_body_may_not_pause(impatient) -> None:
    """The limit is for what makes no progress, and not for the whole stream."""
    pause = threading.Event()
    with Stream(impatient) as stream:
        for i in range(6):
            stream.send_texts("a")
            assert stream.record()["id"] == i
            pause.wait(0.8)
        (last,) = stream.rest()
    assert (last["error"]["status"], last["error"]["code"]) == (408, "request_timeout")


def test_a_text_that_does_not_fit_the_memory_is_the_only_one_that_fails(faulty_server) -> None:
    with faulty_server(MEMORY_TOKENS="500") as server, server.client() as client:
        content = lines(20) + lines(1, "search " * 600) + lines(20)
        answer = client.post(PATH, content=content, headers={"Content-Type": NDJSON})
        found = [json.loads(line) for line in answer.content.splitlines()]
    assert [i for i, each in enumerate(found) if "error" in each] == [20]
    assert (found[20]["error"]["status"], found[20]["error"]["code"]) == (503, "out_of_memory")
