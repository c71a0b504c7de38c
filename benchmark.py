"""Measure a running Smart Embedder from outside: latency and throughput of its POST endpoints.

A fixed number of workers send a request, read the whole response and send the next request
(closed-loop load). Bodies are built before the measurement and responses are not parsed, so that
the client needs little of a machine that it may share with the server. Latencies and rates count
only successful requests. Exit code: 0, 1 if a request failed, 2 for bad arguments.
"""

import argparse
import asyncio
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import orjson
from tqdm import tqdm

VOCABULARY = (
    "river winter copper engine letter garden signal market window harbour method paper silver "
    "cloud battery teacher island formula bridge theatre kernel village orbit recipe contract "
    "forest mirror traffic glacier museum protein station ladder voltage harvest archive the of "
    "and with under between slowly measures carries opens before after every small northern old"
)
WORDS = VOCABULARY.split()

PATHS = {"embed_dense": "/embeddings/", "embed_full": "/embeddings/", "rerank": "/rerank"}

RATE_LIMIT_HINT = (
    "429 is the server's rate limit: to measure from one address, start it with higher "
    "RATE_LIMIT_REQUESTS_PER_MINUTE and RATE_LIMIT_BURST_SIZE."
)

Row = dict[str, str | float | None]


class BenchmarkError(Exception):
    """The run cannot continue; the message is one sentence for the user."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of the command line."""

    url: str
    token: str
    concurrency: int
    requests: int
    batch_size: int
    warmup: int
    timeout: float
    scenarios: list[str]
    sleep_between: float
    json: Path | None


@dataclass(slots=True)
class Outcome:
    """The results of one scenario: seconds of each success, and failures counted by kind."""

    latencies: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    wall: float = 0.0


def make_bodies(scenario: str, plan: Plan) -> list[bytes]:
    """Return the bodies of a scenario, those of the warm-up first, the same in each run.

    All texts differ.
    """
    rng = random.Random(scenario)  # noqa: S311 (texts must repeat)

    def words(fewest: int, most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(fewest, most)))

    bodies = []
    for number in range(plan.warmup + plan.requests):
        texts = [f"{number}.{index} {words(5, 30)}" for index in range(plan.batch_size)]
        full = scenario == "embed_full"
        body: dict[str, object] = {"sentences": texts, "return_dense": True}
        body |= {"return_sparse": full, "return_colbert": full}
        if scenario == "rerank":
            body = {"query": f"{number} {words(3, 12)}", "passages": texts}
        bodies.append(orjson.dumps(body))
    return bodies


async def send(session: aiohttp.ClientSession, url: str, body: bytes, outcome: Outcome) -> None:
    """Send one request and note its latency, or the kind of failure."""
    start = time.perf_counter()
    try:
        async with session.post(url, data=body) as response:
            content = await response.read()
    except (aiohttp.ClientError, OSError) as error:  # OSError includes TimeoutError
        outcome.failures[type(error).__name__] += 1
        return
    elapsed = time.perf_counter() - start
    if response.status == HTTPStatus.OK:
        outcome.latencies.append(elapsed)
        return
    try:
        code = orjson.loads(content)["code"]
    except (ValueError, TypeError, KeyError):  # Not an error of the service.
        code = ""
    outcome.failures[f"{response.status} {code}".rstrip()] += 1


async def run_load(
    session: aiohttp.ClientSession, name: str, plan: Plan, bodies: Sequence[bytes], label: str
) -> Outcome:
    """Send all bodies with `plan.concurrency` workers."""
    outcome = Outcome()
    remaining = iter(bodies)
    url = plan.url + PATHS[name]

    async def work() -> None:
        for body in remaining:
            await send(session, url, body, outcome)
            progress.update()

    with tqdm(total=len(bodies), desc=label, unit="req", mininterval=0.5, leave=False) as progress:
        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(plan.concurrency)))
        outcome.wall = time.perf_counter() - start
    return outcome


async def run(plan: Plan) -> dict[str, Outcome]:
    """Run the scenarios of the plan one after the other, with pauses between them."""
    outcomes: dict[str, Outcome] = {}
    headers = {"Content-Type": "application/json"}
    if plan.token:
        headers["Authorization"] = f"Bearer {plan.token}"
    # Shorter than the five seconds after which uvicorn closes an idle connection.
    connector = aiohttp.TCPConnector(limit=plan.concurrency, keepalive_timeout=3)
    timeout = aiohttp.ClientTimeout(total=plan.timeout)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=timeout
    ) as session:
        try:
            async with session.get(plan.url + "/health") as response:
                await response.read()
        except (aiohttp.ClientError, OSError) as error:
            message = f"No server answers at {plan.url} ({type(error).__name__})"
            raise BenchmarkError(f"{message}; is it running?") from None
        for name in plan.scenarios:
            if outcomes and plan.sleep_between:
                await asyncio.sleep(plan.sleep_between)
            bodies = make_bodies(name, plan)
            if plan.warmup:
                await run_load(session, name, plan, bodies[: plan.warmup], f"{name} warm-up")
            outcomes[name] = await run_load(session, name, plan, bodies[plan.warmup :], name)
    return outcomes


def figures(name: str, plan: Plan, outcome: Outcome) -> Row:
    """Return the row of one scenario; latencies in milliseconds, None if all requests failed."""
    ok = len(outcome.latencies)
    row: Row = {
        "Scenario": name,
        "Reqs": plan.requests,
        "OK": ok,
        "Fail": outcome.failures.total(),
        "Conc": plan.concurrency,
        "Wall": outcome.wall,
        "Req/s": ok / outcome.wall,
        "Units/s": ok * plan.batch_size / outcome.wall,
    }
    names = ("Avg", "P50", "P95", "P99", "Min", "Max")
    if not ok:
        return row | dict.fromkeys(names)
    ms = np.asarray(outcome.latencies) * 1000.0
    values = (ms.mean(), *np.percentile(ms, (50, 95, 99)), ms.min(), ms.max())
    return row | {name: float(value) for name, value in zip(names, values, strict=True)}


def format_table(rows: Sequence[Row]) -> str:
    """Format the rows under their column names, text aligned left and numbers right."""
    lines = [list(rows[0]), *([format_cell(cell) for cell in row.values()] for row in rows)]
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(first), *map(str.rjust, line[1:], others)]) for line in lines
    )


def format_cell(cell: str | float | None) -> str:
    """Format measured numbers with two decimals, and None as a dash."""
    if cell is None:
        return "-"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def report(plan: Plan, outcomes: dict[str, Outcome]) -> None:
    """Print the table and the failures; write the JSON file if requested."""
    rows = [figures(name, plan, outcome) for name, outcome in outcomes.items()]
    print(format_table(rows))
    print("Wall in seconds, latencies in ms. Units are sentences or passages.")
    for name, outcome in outcomes.items():
        for kind, count in outcome.failures.most_common():
            print(f"{name}: {count} failed with {kind}")
    if any(kind.startswith("429") for outcome in outcomes.values() for kind in outcome.failures):
        print(RATE_LIMIT_HINT)
    if plan.json:
        failures = (dict(outcome.failures) for outcome in outcomes.values())
        pairs = zip(rows, failures, strict=True)
        content = {"scenarios": [row | {"Failures": kinds} for row, kinds in pairs]}
        try:
            plan.json.write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n")
        except OSError as error:
            raise BenchmarkError(f"{plan.json} cannot be written: {error.strerror}") from None


def at_least(low: int) -> Callable[[str], int]:
    """Return an argparse type: a whole number not below `low`."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return whole_number


def seconds(text: str) -> float:
    """Argparse type: a duration, zero included."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def base_url(text: str) -> str:
    """Argparse type: an http or https address, without a slash at its end; bad ports raise."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an http:// or https:// address")
    return text.rstrip("/")


def scenario_names(text: str) -> list[str]:
    """Argparse type: comma-separated scenario names, each counted once."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in PATHS:
            known = ", ".join(PATHS)
            raise argparse.ArgumentTypeError(f"{name!r} is not a scenario; choose from {known}")
    return names


def read_plan() -> Plan:
    """Parse the command line; a bad one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        description="Measure latency and throughput of a running Smart Embedder.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--url", type=base_url, default="http://localhost:8000", help="address of the server")
    add("--token", type=str.strip, help="the access token, if the server requires one (API_TOKEN)")
    add("--concurrency", type=at_least(1), default=8, help="concurrent requests")
    add("--requests", type=at_least(1), default=100, help="measured requests in each scenario")
    add("--batch-size", type=at_least(1), default=4, help="sentences or passages in a request")
    add("--warmup", type=at_least(0), default=5, help="requests before the measured ones")
    add("--timeout", type=seconds, default=60.0, help="seconds until a request counts as failed")
    help_ = "the largest --batch-size that is allowed; 0 allows any"
    add("--max-batch-size", type=at_least(0), default=128, help=help_)
    help_ = "comma-separated scenarios"
    add("--scenarios", type=scenario_names, default=",".join(PATHS), help=help_)
    add("--sleep-between", type=seconds, default=0.0, help="seconds of pause between scenarios")
    add("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    options = vars(parser.parse_args())
    largest = options.pop("max_batch_size")
    if options["token"] is None:
        options["token"] = os.environ.get("API_TOKEN", "").strip()
    if largest and options["batch_size"] > largest:
        parser.error(f"--batch-size {options['batch_size']} is above --max-batch-size {largest}")
    if options["timeout"] == 0:
        parser.error("--timeout must be above 0")
    if options["json"] and not options["json"].parent.is_dir():
        parser.error(f"--json: the folder of {options['json']} does not exist")
    return Plan(**options)


def main() -> int:
    """Run the benchmark of the command line and return the exit code."""
    plan = read_plan()
    try:
        outcomes = asyncio.run(run(plan))
        report(plan, outcomes)
    except BenchmarkError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if any(outcome.failures for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
