"""benchmark.py against a server on a real port."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

import benchmark
from tests.support.server import free_port

HEADER = "Scenario Reqs OK Fail Conc Wall Req/s Units/s Avg P50 P95 P99 Min Max"


@dataclass
class Server:
    """A stand-in for the service: keeps what it was sent, answers a little JSON or a failure."""

    fail_every: int = 0
    failure: tuple[int, str] = (503, "queue_full")
    meeting: asyncio.Barrier | None = None
    url: str = ""
    bodies: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tokens: set[str | None] = field(default_factory=set)

    async def answer(self, request: web.Request) -> web.Response:
        if self.meeting:
            await self.meeting.wait()
        seen = self.bodies.setdefault(request.path, [])
        seen.append(await request.json())
        self.tokens.add(request.headers.get("Authorization"))
        if self.fail_every and len(seen) % self.fail_every == 0:
            status, code = self.failure
            body = {"detail": "A sentence.", "code": code, "request_id": "1"}
            return web.json_response(body, status=status)
        return web.json_response({"data": []})


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Server]:
    app = web.Application()
    app.add_routes([web.post(path, server.answer) for path in ("/embeddings/", "/rerank")])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = "http://{}:{}".format(*runner.addresses[0])
    try:
        yield server
    finally:
        await runner.cleanup()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs it on a thread, as its loop is its own; the exit status, and what it printed."""
    monkeypatch.setenv("API_TOKEN", " from-the-environment\n")

    async def run(options: str, server: Server | None = None) -> tuple[object, str, str]:
        async with serving(server or Server()) as serves:
            monkeypatch.setattr(sys, "argv", ["", "--url", f"{serves.url}/", *options.split(" ")])
            try:
                code: object = await asyncio.to_thread(benchmark.main)
            except SystemExit as ended:
                code = ended.code
        return code, *capsys.readouterr()

    return run


def read_table(output: str) -> list[dict[str, str]]:
    """Return the rows of the printed table, each a mapping from column name to cell."""
    header, *lines = (line.split() for line in output.splitlines())
    assert header == HEADER.split()
    return [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header)]


async def test_a_scenario_sends_what_it_promises_and_gives_one_row(run) -> None:
    server = Server()
    code, out, err = await run("--requests 20 --concurrency 4 --batch-size 3 --warmup 2", server)
    rows = read_table(out)
    assert code == 0, err
    assert [row["Scenario"] for row in rows] == ["embed_dense", "embed_full", "rerank"]
    for row in rows:
        assert [row[name] for name in ("Reqs", "OK", "Fail", "Conc")] == ["20", "20", "0", "4"]
        latencies = [float(row[name]) for name in ("Min", "P50", "P95", "P99", "Max")]
        assert latencies == sorted(latencies)
    assert "embed_full" in err, "the progress bar names the scenario"
    embeddings, reranks = server.bodies["/embeddings/"], server.bodies["/rerank"]
    kinds = [
        tuple(body[f"return_{kind}"] for kind in ("dense", "sparse", "colbert"))
        for body in embeddings
    ]
    assert kinds == [(True, False, False)] * 22 + [(True, True, True)] * 22
    assert all(len(body["passages"]) == 3 and body["query"] for body in reranks)
    texts = [text for body in embeddings for text in body["sentences"]]
    assert len(set(texts)) == len(texts) == 132
    assert max(map(len, texts)) > 3 * min(map(len, texts)), "lengths are mixed"


async def test_concurrency_is_the_number_of_requests_under_way(run) -> None:
    """The server answers nobody until four requests have met; with fewer nothing would end."""
    server = Server(meeting=asyncio.Barrier(4))
    options = "--requests 20 --concurrency 4 --warmup 0 --timeout 20"
    # Without a largest size, any is sent.
    code, _, err = await run(f"{options} --batch-size 300 --max-batch-size 0", server)
    assert code == 0, err
    assert {len(body["passages"]) for body in server.bodies["/rerank"]} == {300}


@pytest.mark.parametrize(
    ("option", "token"),
    [
        ("", "Bearer from-the-environment"),
        (" --token given", "Bearer given"),
        (" --token ", None),
    ],
)
async def test_the_token_is_that_of_the_service_unless_one_is_given(run, option, token) -> None:
    server = Server()
    await run(f"--scenarios rerank --requests 2{option}", server)
    assert server.tokens == {token}


async def test_it_sleeps_between_scenarios_and_only_there(run, monkeypatch) -> None:
    server, slept, sleep = Server(), [], asyncio.sleep

    async def note(seconds: float, *result: object) -> None:
        if seconds == 1234:
            slept.append({path: len(bodies) for path, bodies in server.bodies.items()})
        else:
            await sleep(seconds, *result)

    monkeypatch.setattr(asyncio, "sleep", note)
    await run("--scenarios embed_dense,rerank --requests 8 --sleep-between 1234", server)
    assert slept == [{"/embeddings/": 5 + 8}]


async def test_every_run_sends_the_same_texts(run) -> None:
    server = Server()
    for _ in range(2):
        await run("--scenarios embed_dense --requests 5 --concurrency 1", server)
    sent = server.bodies["/embeddings/"]
    assert sent[:10] == sent[10:]


@pytest.mark.parametrize(
    ("server", "ok", "told"),
    [
        pytest.param(Server(fail_every=5), "16", "4 failed with 503 queue_full", id="some"),
        pytest.param(
            Server(1, (429, "rate_limited")), "0", "20 failed with 429 rate_limited", id="limit"
        ),
    ],
)
async def test_failed_requests_are_counted_by_kind_and_end_in_exit_code_1(
    run, server: Server, ok: str, told: str
) -> None:
    options = "--scenarios rerank,embed_dense --requests 20 --warmup 0"
    code, out, _ = await run(options, server)
    assert code == 1
    for row, name in zip(read_table(out), ("rerank", "embed_dense"), strict=True):
        assert (row["Scenario"], row["OK"], row["Fail"]) == (name, ok, str(20 - int(ok)))
        assert (row["P50"] == "-") == (ok == "0")
        assert f"{name}: {told}" in out
    way_out = "higher RATE_LIMIT_REQUESTS_PER_MINUTE and RATE_LIMIT_BURST_SIZE"
    assert (way_out in out) == ("429" in told)


async def test_json_file_holds_the_figures_of_the_table(run, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    options = f"--requests 10 --batch-size 2 --warmup 0 --json {file}"
    _, out, _ = await run(options, Server(fail_every=5))
    scenarios = json.loads(file.read_text())["scenarios"]
    assert [scenario.pop("Failures") for scenario in scenarios] == [{"503 queue_full": 2}] * 3
    shown = [{name: benchmark.format_cell(cell) for name, cell in row.items()} for row in scenarios]
    assert shown == read_table(out)
    for row in scenarios:
        assert row["Req/s"] == pytest.approx(row["OK"] / row["Wall"])
        assert row["Units/s"] == pytest.approx(2 * row["OK"] / row["Wall"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch-size 9 --max-batch-size 8", "9 is above --max-batch-size 8"),
        ("--batch-size 129", "129 is above --max-batch-size 128"),
        ("--concurrency 0", "'0' is not a whole number of at least 1"),
        ("--scenarios rerank,search", "'search' is not a scenario"),
        ("--sleep-between nan", "'nan' is not a number of seconds"),
        ("--timeout 0", "--timeout must be above 0"),
        ("--url localhost:8000", "'localhost:8000' is not an http:// or https:// address"),
    ],
)
async def test_bad_arguments_are_explained_with_exit_code_2(run, options, message: str) -> None:
    code, out, err = await run(options)
    assert (code, out) == (2, "")
    assert message in err


def test_an_unreachable_server_is_one_sentence_and_exit_code_1() -> None:
    """In a process, as its users run it."""
    address = f"http://127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, benchmark.__file__, "--url", address],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"benchmark: No server answers at {address} ")
    assert len(done.stderr.splitlines()) == 1
