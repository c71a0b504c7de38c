"""Clients that repeat the cases in random order, among other requests."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx2

from tests.faults.raw import head
from tests.faults.tally import Tally
from tests.oracle.cases import Case, Malformed
from tests.oracle.comparison import Answer, Comparison, parse
from tests.support.server import RunningServer

CLIENTS = 24
LEAVE_SHARE = 0.05
MALFORMED_SHARE = 0.05
# Seconds that a client waits at most before it leaves.
LONGEST_STAY = 0.05
LONGEST_DETAIL = 400
JSON = {"Content-Type": "application/json"}
PRIORITIES = [f"u={urgency}" for urgency in range(8)] + ["u=1, i", "u=99", "?", ""]


async def ask_idle(server: RunningServer, cases: Sequence[Case]) -> list[Answer]:
    """Send the cases one after the other; every later response must equal these."""
    expected = []
    async with server.async_client() as client:
        for case in cases:
            response = await client.post(case.path, content=case.content, headers=JSON)
            assert response.status_code == 200, response.text
            expected.append(parse(response.content))
    return expected


@dataclass
class Traffic:
    """A run: the cases with their expected responses, and the outcomes of the requests."""

    server: RunningServer
    cases: Sequence[Case]
    expected: Sequence[Answer]
    malformed: Sequence[Malformed]
    comparison: Comparison
    tally: Tally = field(default_factory=Tally)
    rng: random.Random = field(default_factory=lambda: random.Random(11))

    async def run(self, supply: Iterator[object], clients: int = CLIENTS) -> None:
        """Send a request for each item of `supply`, with this many concurrent clients."""
        async with self.server.async_client() as client:
            await asyncio.gather(*(self._run_client(client, supply) for _ in range(clients)))

    async def _run_client(self, client: httpx2.AsyncClient, supply: Iterator[object]) -> None:
        for _ in supply:
            chance = self.rng.random()
            case = self.rng.choice(self.cases)
            if chance < LEAVE_SHARE:
                await self._leave(case)
            elif chance < LEAVE_SHARE + MALFORMED_SHARE:
                await self._send_malformed(client)
            else:
                await self._send(client, case)

    async def _send(self, client: httpx2.AsyncClient, case: Case) -> None:
        headers = JSON | {"Priority": self.rng.choice(PRIORITIES)}
        response = await self._post(client, case.path, case.content, headers)
        if response is None:
            return
        if response.status_code == 200:
            self.comparison.compare(case, self.expected[case.number], response.content)
        else:
            self._add_fault(f"request {case.number} to {case.path}", response)

    async def _send_malformed(self, client: httpx2.AsyncClient) -> None:
        malformed = self.rng.choice(self.malformed)
        response = await self._post(client, malformed.path, malformed.content, JSON)
        if response is None:
            return
        detail = response.json().get("detail", "")
        in_one_line = 0 < len(detail) <= LONGEST_DETAIL and "\n" not in detail
        if response.status_code != malformed.status or not in_one_line:
            self._add_fault(f"{malformed.content[:200]!r} to {malformed.path}", response)

    async def _post(
        self, client: httpx2.AsyncClient, path: str, content: bytes, headers: dict[str, str]
    ) -> httpx2.Response | None:
        """Send a request and count its status; without a response it counts as lost."""
        try:
            response = await client.post(path, content=content, headers=headers)
        except httpx2.TransportError:
            self.tally.sent += 1
            return None
        self.tally.note(response.status_code)
        return response

    def _add_fault(self, request: str, response: httpx2.Response) -> None:
        self.comparison.wrong.append(f"{request}: {response.status_code} {response.text[:200]}")

    async def _leave(self, case: Case) -> None:
        """Leave in the middle of the body, or while the response is computed."""
        host, port = self.server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sent = self.rng.choice([len(case.content), len(case.content), len(case.content) // 2])
        writer.write(head(len(case.content), case.path) + case.content[:sent])
        try:
            await asyncio.wait_for(reader.read(1), self.rng.uniform(0, LONGEST_STAY))
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
        self.tally.leave()
