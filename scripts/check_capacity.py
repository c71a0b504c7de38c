"""How well tools.capacity predicts: P50 and P99 at three loads, simulated and measured.

    python -m scripts.check_capacity --seconds 40

Starts the service with the settings in force, measures it as tools.capacity does, and then sends
requests at random times, whether or not earlier ones are answered (open loop, Poisson, a fixed
seed). The simulation gets the same requests at the same times: with other random times alone P99
at 70 % of a full device moves by a quarter. A load is a share of what the device could do one
request at a time; the last column says how many cores other programs kept busy meanwhile. The exit
status is 1 where a figure is off by more than a fifth.
"""

import argparse
import asyncio
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
import numpy as np
import orjson
import psutil

from tools.capacity.cost import CostModel, fit
from tools.capacity.load import Arrival, Load, drawn_from
from tools.capacity.measure import Client, make_text, measure
from tools.capacity.plan import devices_of
from tools.capacity.service import started_service
from tools.capacity.simulation import Outcome, Simulation

SHARES = (0.3, 0.5, 0.7)
MOST_ERROR = 0.2
PERCENTS = (50, 99)
KINDS = "dense"
HEADS = (
    *("load", "requests/s", "requests", "percentile"),
    *("predicted ms", "measured ms", "ratio", "cores of others"),
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts by their length in tokens; each length is sent equally often."""

    by_tokens: dict[int, str]

    @property
    def lengths(self) -> list[tuple[int, float]]:
        """What a load draws from."""
        return [(tokens, 1.0) for tokens in self.by_tokens]


def draw_texts(client: Client) -> Texts:
    """Sentences and short paragraphs."""
    texts = [make_text(words, words) for words in range(8, 72, 3)]
    return Texts({client.count_tokens(text): text for text in texts})


def full_rate(cost: CostModel, texts: Texts) -> float:
    """Requests a second that a device could answer one at a time."""
    return 1 / float(np.mean([cost.forward([tokens]) for tokens in texts.by_tokens]))


async def send_all(url: str, client: Client, texts: Texts, arrivals: list[Arrival]) -> Outcome:
    """Send each request at its time; the seconds to its whole answer, from when it was due."""
    bodies = {tokens: orjson.dumps(client.body([text])) for tokens, text in texts.by_tokens.items()}
    headers = {"Content-Type": "application/json"}
    latencies, refused = [0.0] * len(arrivals), Counter[int]()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, headers=headers) as session:

        async def send(place: int, body: bytes, due: float) -> None:
            async with session.post(client.path, data=body) as answer:
                await answer.read()
                refused.update([answer.status] if answer.status != HTTPStatus.OK else [])
            latencies[place] = time.perf_counter() - due

        async with asyncio.TaskGroup() as tasks:
            began = time.perf_counter() + 0.5
            for place, arrival in enumerate(arrivals):
                due = began + arrival.time
                await asyncio.sleep(due - time.perf_counter())
                tasks.create_task(send(place, bodies[arrival.lengths[0]], due))
    if refused:
        print(f"refused: {refused}", file=sys.stderr)
    return Outcome(latencies, refused.total(), 0.0, [])


class Others:
    """What other programs of this machine compute: with them, times say little."""

    def __init__(self, ours: list[psutil.Process]) -> None:
        self._ours = ours
        self._began, self._busy, self._own = self._look()

    def _look(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        own = sum(sum(each.cpu_times()[:2]) for each in self._ours)
        return time.perf_counter(), times.user + times.system + times.nice, own

    @property
    def cores(self) -> float:
        """How many cores they kept busy since this was made, on average."""
        now, busy, own = self._look()
        return max(0.0, (busy - self._busy - (own - self._own)) / (now - self._began))


def compare(url: str, client: Client, share: float, seconds: float) -> bool:
    """Print the rows of a load; whether its figures are close enough."""
    table = measure(client, KINDS, lambda _: None)
    cost, texts = fit(table), draw_texts(client)
    load = Load(share * full_rate(cost, texts), drawn_from(texts.lengths))
    arrivals = list(load.arrivals(int(load.rate * seconds), seed=1))
    others = Others([psutil.Process(), *psutil.Process().children(recursive=True)])
    measured = asyncio.run(send_all(url, client, texts, arrivals))
    cores = others.cores
    predicted = Simulation(devices_of(table)).run(arrivals)
    close = True
    for percent in PERCENTS:
        ours, theirs = predicted.percentile(percent), measured.percentile(percent)
        close &= abs(ours / theirs - 1) <= MOST_ERROR
        figures = f"{ours * 1000:.1f} | {theirs * 1000:.1f} | {ours / theirs:.2f} | {cores:.2f} |"
        print(
            f"| {share:.0%} | {load.rate:.1f} | {len(arrivals)} | P{percent} | {figures}",
            flush=True,
        )
    return close


def main() -> int:
    """Measure, simulate, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=40, help="seconds of each load (%(default)g)"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="*",
        default=SHARES,
        help="the loads, as shares of what the device can do",
    )
    arguments = parser.parse_args()
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    with started_service() as url, closing(Client(url, KINDS)) as client:
        close = [compare(url, client, share, arguments.seconds) for share in arguments.shares]
    return 0 if all(close) else 1


if __name__ == "__main__":
    sys.exit(main())
