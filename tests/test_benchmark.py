"""benchmark.py, run as its users run it: a process of its own against a server on a real port."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

BENCHMARK = Path(__file__).parent.parent / "benchmark.py"
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
    times: list[float] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        if self.meeting:
            await self.meeting.wait()
        seen = self.bodies.setdefault(request.path, [])
        seen.append(await request.json())
        self.times.append(time.monotonic())
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


async def run_benchmark(*arguments: str, **environment: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(BENCHMARK),
        *arguments,
        env={name: value for name, value in os.environ.items() if name != "API_TOKEN"}
        | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def read_table(output: str) -> list[dict[str, str]]:
    """Return the rows of the printed table, each a mapping from column name to cell."""
    header, *lines = (line.split() for line in output.splitlines())
    assert header == HEADER.split()
    return [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header)]


async def test_healthy_server_gives_one_row_for_each_scenario_and_exit_code_0() -> None:
    async with serving(Server()) as server:
        options = ["--requests", "20", "--concurrency", "4", "--batch-size", "3", "--warmup", "2"]
        code, out, err = await run_benchmark("--url", server.url, *options)
    rows = read_table(out)
    assert code == 0, err
    assert [row["Scenario"] for row in rows] == ["embed_dense", "embed_full", "rerank"]
    for row in rows:
        assert [row[name] for name in ("Reqs", "OK", "Fail", "Conc")] == ["20", "20", "0", "4"]
        latencies = [float(row[name]) for name in ("Min", "P50", "P95", "P99", "Max")]
        assert latencies == sorted(latencies)
    assert "embed_full" in err, "the progress bar names the scenario"


async def test_concurrency_is_the_number_of_requests_under_way() -> None:
    """The server answers nobody until four requests have met; with fewer nothing would end."""
    async with serving(Server(meeting=asyncio.Barrier(4))) as server:
        options = ["--requests", "20", "--concurrency", "4", "--warmup", "0", "--timeout", "20"]
        # Without a largest size, any is sent.
        options += ["--batch-size", "300", "--max-batch-size", "0"]
        code, _, err = await run_benchmark("--url", server.url, *options)
    assert code == 0, err
    assert {len(body["passages"]) for body in server.bodies["/rerank"]} == {300}


async def test_requests_are_what_the_scenario_promises_and_no_text_comes_twice() -> None:
    async with serving(Server()) as server:
        options = ["--requests", "10", "--batch-size", "3", "--warmup", "2", "--token", "secret"]
        await run_benchmark("--url", server.url + "/", *options)
    embeddings, reranks = server.bodies["/embeddings/"], server.bodies["/rerank"]
    kinds = [
        tuple(body[f"return_{kind}"] for kind in ("dense", "sparse", "colbert"))
        for body in embeddings
    ]
    assert kinds == [(True, False, False)] * 12 + [(True, True, True)] * 12
    assert all(len(body["passages"]) == 3 and body["query"] for body in reranks)
    texts = [text for body in embeddings for text in body["sentences"]]
    assert len(set(texts)) == len(texts) == 72
    assert max(map(len, texts)) > 3 * min(map(len, texts)), "lengths are mixed"
    assert server.tokens == {"Bearer secret"}


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ([], {"Bearer from-the-environment"}),
        (["--token", "given"], {"Bearer given"}),
        (["--token", ""], {None}),
    ],
)
async def test_the_token_is_that_of_the_service_unless_one_is_given(
    options: list[str], tokens: set[str | None]
) -> None:
    async with serving(Server()) as server:
        few = ["--scenarios", "rerank", "--requests", "2", *options]
        await run_benchmark("--url", server.url, *few, API_TOKEN=" from-the-environment\n")
    assert server.tokens == tokens


async def test_it_sleeps_between_scenarios_and_only_there() -> None:
    async with serving(Server()) as server:
        few = ["--scenarios", "embed_dense,rerank", "--requests", "8", "--concurrency", "1"]
        code, _, err = await run_benchmark("--url", server.url, *few, "--sleep-between", "2")
    assert code == 0, err
    pauses = [after - before for before, after in pairwise(server.times)]
    longest = max(range(len(pauses)), key=pauses.__getitem__)
    assert longest == len(server.bodies["/embeddings/"]) - 1
    assert pauses[longest] >= 2
    assert sorted(pauses)[-2] < 2, "nobody slept a second time"


async def test_every_run_sends_the_same_texts() -> None:
    async with serving(Server()) as server:
        options = ["--scenarios", "embed_dense", "--requests", "5", "--concurrency", "1"]
        for _ in range(2):
            await run_benchmark("--url", server.url, *options)
    sent = server.bodies["/embeddings/"]
    assert sent[:10] == sent[10:]


async def test_failed_requests_are_counted_by_kind_and_end_in_exit_code_1() -> None:
    async with serving(Server(fail_every=5)) as server:
        options = ["--scenarios", "rerank,embed_dense", "--requests", "20", "--warmup", "0"]
        code, out, err = await run_benchmark("--url", server.url, *options)
    assert code == 1
    assert [(row["Scenario"], row["OK"], row["Fail"]) for row in read_table(out)] == [
        ("rerank", "16", "4"),
        ("embed_dense", "16", "4"),
    ]
    assert "rerank: 4 failed with 503 queue_full" in out
    assert "RATE_LIMIT" not in out
    assert "Traceback" not in out + err


async def test_the_rate_limit_is_a_failure_with_a_way_out_and_dashes_for_latencies() -> None:
    async with serving(Server(fail_every=1, failure=(429, "rate_limited"))) as server:
        options = ["--scenarios", "rerank", "--requests", "3", "--warmup", "0"]
        code, out, _ = await run_benchmark("--url", server.url, *options)
    assert code == 1
    assert [read_table(out)[0][name] for name in ("OK", "Fail", "P50")] == ["0", "3", "-"]
    assert "rerank: 3 failed with 429 rate_limited" in out
    assert "higher RATE_LIMIT_REQUESTS_PER_MINUTE and RATE_LIMIT_BURST_SIZE" in out


async def test_json_file_holds_the_figures_of_the_table(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    async with serving(Server(fail_every=5)) as server:
        options = ["--requests", "10", "--batch-size", "2", "--warmup", "0", "--json", str(file)]
        _, out, _ = await run_benchmark("--url", server.url, *options)
    scenarios = json.loads(file.read_text())["scenarios"]
    assert [scenario.pop("Failures") for scenario in scenarios] == [{"503 queue_full": 2}] * 3
    printed = [
        {
            name: f"{cell:.2f}" if isinstance(cell, float) else str(cell)
            for name, cell in row.items()
        }
        for row in scenarios
    ]
    assert printed == read_table(out)
    for row in scenarios:
        assert row["Req/s"] == pytest.approx(row["OK"] / row["Wall"])
        assert row["Units/s"] == pytest.approx(2 * row["OK"] / row["Wall"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "9", "--max-batch-size", "8"], "9 is above --max-batch-size 8"),
        (["--batch-size", "129"], "129 is above --max-batch-size 128"),
        (["--concurrency", "0"], "'0' is not a whole number of at least 1"),
        (["--scenarios", "rerank,search"], "'search' is not a scenario"),
        (["--sleep-between", "nan"], "'nan' is not a number of seconds"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--url", "localhost:8000"], "'localhost:8000' is not an http:// or https:// address"),
        (["--bogus"], "unrecognized arguments: --bogus"),
    ],
)
async def test_bad_arguments_are_explained_with_exit_code_2(
    arguments: list[str], message: str
) -> None:
    code, out, err = await run_benchmark(*arguments)
    assert (code, out) == (2, "")
    assert message in err


async def test_unreachable_server_is_one_sentence_and_exit_code_1() -> None:
    async with serving(Server()) as server:
        pass  # The port is free again once the server has gone.
    code, out, err = await run_benchmark("--url", server.url)
    assert (code, out) == (1, "")
    assert err.startswith(f"benchmark: No server answers at {server.url} ")
    assert len(err.splitlines()) == 1
