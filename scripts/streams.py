"""Streams against a real server: memory, readers that stop, clients that leave, neighbours, speed.

    python -m scripts.streams memory --lines 100000
    python -m scripts.streams neighbours --folder /path/to/a/checkpoint --max-batch-tokens 1024
    python -m scripts.streams speed --folder /path/to/a/checkpoint --lines 10000

Without a folder it makes a tiny random checkpoint. It fails where a record is missing or wrong, the
memory leaves 5 % after the first minute, something is computed for a client that has left, a
sentence's P99 beside four streams is above three forwards, or a stream has less than 95 % of the
throughput that the engine has by itself. Numbers of a machine that does something else, too, say
little.
"""

import argparse
import asyncio
import json
import operator
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil

from app.engine import Engine
from app.models.load import load_models
from app.settings import Settings
from tests.support.checkpoints import save_m3
from tests.support.server import RunningServer, run_server
from tests.support.streaming import Stream

BAD_LINE, STOP_SECONDS, FIRST_MINUTE = 0.5, 20.0, 60.0
MOST_CHANGE, MOST_FORWARDS, LEAST_SHARE = 0.05, 3.0, 0.95
LONGEST_WAIT = 600.0
STREAMS, SINGLES = 4, 120
TURNS = 7
WORDS = ["search", "vector", "river", "bread", "жизнь", "检索", "مرحبا", "naïve", "👍", "hybrid"]
FORWARDS = "embedding_gpu_inference_duration_seconds"


def texts_of(count: int, seed: int, most_words: int = 40) -> list[str]:
    """So many texts of up to so many words."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, most_words))) for _ in range(count)]


def send(stream: Stream, texts: Iterator[str], bad: int = -1) -> threading.Thread:
    """Send texts in a thread, the one at `bad` as a line that is none, until they end."""

    def run() -> None:
        lines: list[bytes] = []
        with suppress(OSError):  # The stream has been closed.
            for i, text in enumerate(texts):
                content = {"nonsense": text} if i == bad else {"id": i, "text": text}
                lines.append(json.dumps(content).encode() + b"\n")
                if len(lines) == 100:
                    stream.send(b"".join(lines))
                    lines.clear()
            if lines:
                stream.send(b"".join(lines))
            stream.end()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def repeated(texts: list[str]) -> Iterator[str]:
    """The same texts without end."""
    while True:
        yield from texts


class Memory(threading.Thread):
    """The server's resident memory, twice a second."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._process = psutil.Process(server.process.pid)
        self._done = threading.Event()
        self.samples: list[tuple[float, int]] = []
        self.start()

    def run(self) -> None:
        """Sample until `stop`."""
        began = time.monotonic()
        while not self._done.wait(0.5):
            self.samples.append((time.monotonic() - began, self._process.memory_info().rss))

    def stop(self) -> None:
        """Take no more samples."""
        self._done.set()
        self.join()

    def change(self, since: float) -> float:
        """The largest distance from what it was then, as a fraction."""
        later = [size for passed, size in self.samples if passed >= since]
        return max(abs(size / later[0] - 1) for size in later) if later else 0.0


def check_memory(server: RunningServer, lines: int) -> list[str]:
    """100,000 lines, a bad one in the middle, a reader that stops, and a client that leaves."""
    bad, faults = int(lines * BAD_LINE), []
    memory = Memory(server)
    began = time.monotonic()
    with Stream(server) as stream:
        # What was read ahead while nobody read is computed before more is taken of the sender.
        stream.connection.sock.settimeout(LONGEST_WAIT)
        sender = send(stream, iter(texts_of(lines, 1)), bad)
        for i in range(lines):
            record = stream.record()
            if record["id"] != i or ("error" in record) != (i == bad):
                faults.append(f"record {i} is {json.dumps(record)[:200]}")
            if i == lines // 3:
                time.sleep(STOP_SECONDS)
        sender.join()
        if stream.rest():
            faults.append("there are more records than lines")
    seconds = time.monotonic() - began
    memory.stop()
    change = memory.change(min(FIRST_MINUTE, seconds / 3))
    sizes = [size / 2**20 for _, size in memory.samples]
    print(f"{lines} lines in {seconds:.0f} s; memory {min(sizes):.0f} to {max(sizes):.0f} MiB")
    print(f"memory changed by {change:.1%} at most after the first minute, or third")
    if change > MOST_CHANGE:
        faults.append("the memory did not stay")
    return faults + check_leaving(server)


def check_leaving(server: RunningServer) -> list[str]:
    """Nothing is computed once a client that sends without end has left."""
    with Stream(server) as stream:
        sender = send(stream, repeated(texts_of(1000, 2)))
        for _ in range(2000):
            stream.record()
        stream.hang_up()
        sender.join()
    server.wait_for_metric("embedding_active_requests", 0)
    left = server.metric("embedder_batch_tokens_count")
    time.sleep(3)
    more = server.metric("embedder_batch_tokens_count") - left
    print(f"{more:.0f} forwards in 3 s after a client had left")
    return ["something was computed for a client that had left"] if more else []


def check_neighbours(server: RunningServer, _lines: int) -> list[str]:
    """Single sentences beside four streams, all from one address."""
    streams = [Stream(server) for _ in range(STREAMS)]
    for number, stream in enumerate(streams):
        send(stream, repeated(texts_of(1000, number)))
        threading.Thread(target=_read_on, args=(stream,), daemon=True).start()
    server.wait_for_more(lambda: server.metric("embedding_sentences_processed_total"), 200)
    forward = _forward_seconds(server)
    seconds = []
    with server.client() as client:
        for text in texts_of(SINGLES, 9, 12):
            began = time.monotonic()
            body = {"sentences": [text], "return_colbert": False}
            client.post("/embeddings/", json=body).raise_for_status()
            seconds.append(time.monotonic() - began)
    for stream in streams:
        stream.hang_up()
    p50, p99 = np.percentile(seconds, [50, 99])
    print(f"a forward takes {forward * 1000:.0f} ms beside {STREAMS} streams")
    print(
        f"a sentence: P50 {p50 * 1000:.0f} ms, P99 {p99 * 1000:.0f} ms, "
        f"{p99 / forward:.2f} forwards"
    )
    return ["P99 is above three forwards"] if p99 > MOST_FORWARDS * forward else []


def _forward_seconds(server: RunningServer, count: int = 15) -> float:
    """The mean of the next forwards, of the streams alone: those of a sentence are shorter."""
    spent, done = (server.metric(f"{FORWARDS}_{what}") for what in ("sum", "count"))
    server.wait_for_more(lambda: server.metric(f"{FORWARDS}_count"), done + count)
    return (server.metric(f"{FORWARDS}_sum") - spent) / (server.metric(f"{FORWARDS}_count") - done)


def _read_on(stream: Stream) -> None:
    with suppress(Exception):  # It has been closed, in whatever state it was.
        while stream.response.read1(1 << 20):
            pass


def bodies_of(texts: list[str]) -> list[bytes]:
    """The texts as lines, made before a clock runs."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    return [b"".join(lines[i : i + 100]) for i in range(0, len(lines), 100)]


def stream_rate(server: RunningServer, bodies: list[bytes], count: int) -> float:
    """Texts a second of one stream."""
    with Stream(server, headers={"Accept": "application/vnd.safetensors"}) as stream:
        began = time.monotonic()

        def run() -> None:
            for body in bodies:
                stream.send(body)
            stream.end()

        threading.Thread(target=run, daemon=True).start()
        while stream.response.read1(1 << 20):
            pass
        return count / (time.monotonic() - began)


async def engine_rate(engine: Engine, texts: list[str], parts: int = 512) -> float:
    """Texts a second of the engine itself, which is given the next before it has done the last."""
    gate = asyncio.Semaphore(4)

    async def embed(part: list[str]) -> None:
        async with gate:
            await engine.embed(part, colbert=False)

    began = time.monotonic()
    await asyncio.gather(*(embed(texts[i : i + parts]) for i in range(0, len(texts), parts)))
    return len(texts) / (time.monotonic() - began)


async def rates_in_turns(
    settings: Settings, server: RunningServer, texts: list[str]
) -> dict[str, list[float]]:
    """The engine and a stream in turns, so that what else the machine does is the same for both."""
    rates: dict[str, list[float]] = {"engine": [], "stream": []}
    bodies = bodies_of(texts)
    async with Engine(settings, load_models) as engine:
        for turn in range(TURNS + 1):
            of_engine = await engine_rate(engine, texts)
            of_stream = await asyncio.to_thread(stream_rate, server, bodies, len(texts))
            if turn:  # The first one warms up.
                rates["engine"].append(of_engine)
                rates["stream"].append(of_stream)
    return rates


def check_speed(folder: Path, variables: dict[str, str], lines: int) -> list[str]:
    """The engine in this process, and a stream to a server, with the same model."""
    texts = texts_of(lines, 4)
    names = ("embedding_model", "dtype", "max_batch_tokens")
    given = {name: variables[name.upper()] for name in names if name.upper() in variables}
    settings = Settings.model_validate(given | {"reranker_model": "none", "device": "cpu"})
    with run_server(folder, **variables) as server:
        server.wait_until_healthy()
        rates = asyncio.run(rates_in_turns(settings, server, texts))
    print({name: [round(rate, 1) for rate in each] for name, each in rates.items()}, "texts/s")
    share = statistics.median(map(operator.truediv, rates["stream"], rates["engine"]))
    print(f"a stream has {share:.1%} of the engine's own throughput")
    return ["a stream is too slow"] if share < LEAST_SHARE else []


def main() -> int:
    """Run one of them; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["memory", "neighbours", "speed"], help="what is measured")
    parser.add_argument(
        "--lines", type=int, default=100_000, help="lines of the stream (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="a checkpoint of bge-m3's shape")
    parser.add_argument(
        "--max-batch-tokens", default="auto", help="the setting MAX_BATCH_TOKENS (%(default)s)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or save_m3(Path(scratch) / "tiny")
        variables = {
            "EMBEDDING_MODEL": str(folder.resolve()),
            "MAX_BATCH_TOKENS": options.max_batch_tokens,
            "DTYPE": "float32",
        }
        if options.what == "speed":
            faults = check_speed(Path(scratch), variables, options.lines)
        else:
            check = check_memory if options.what == "memory" else check_neighbours
            with run_server(Path(scratch), **variables) as server:
                server.wait_until_healthy()
                faults = check(server, options.lines)
    print("\n".join(faults[:10]) or "all as it should be")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
