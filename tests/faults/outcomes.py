"""Counts what became of every request of a fault test, from the client's side."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import httpx2

from tests.faults.record import Row, record

EMBED = ("/embeddings/", {"sentences": ["search vector"], "return_colbert": False})


@dataclass
class Outcomes:
    """`answered` with 200, `refused` with a 4xx or 503, `failed` with another clear error."""

    sent: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    retry_after: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        record(self.row)

    def row(self) -> Row:
        """For the table of all fault tests."""
        return Row(self.sent, self.answered, self.refused, self.failed, lost=self.lost)

    @property
    def lost(self) -> int:
        """Requests that got no answer of any kind."""
        return self.sent - self.answered - self.refused - self.failed

    async def post(self, client: httpx2.AsyncClient, path: str, body: dict, **headers) -> int:
        """Send one request and count its end; 0 stands for no answer."""
        self.sent += 1
        try:
            response = await client.post(path, json=body, headers=headers)
        except httpx2.TransportError as error:
            self.codes[type(error).__name__] += 1
            return 0
        self.count(response)
        return response.status_code

    def count(self, response: httpx2.Response) -> None:
        """Count one answer; whatever is no success must say so in the one shape."""
        if response.status_code == 200:
            self.answered += 1
            return
        problem = response.json()
        assert problem["detail"]
        assert problem["request_id"]
        self.codes[problem["code"]] += 1
        if response.status_code < 500 or response.status_code == 503:
            self.refused += 1
        else:
            self.failed += 1
        if response.status_code == 503:
            self.retry_after.append(int(response.headers["retry-after"]))


async def post_many(
    client: httpx2.AsyncClient, count: int, at_once: int, path: str = EMBED[0], body=None
) -> Outcomes:
    """Send `count` requests, `at_once` at a time."""
    outcomes, gate = Outcomes(), asyncio.Semaphore(at_once)

    async def one() -> None:
        async with gate:
            await outcomes.post(client, path, body or EMBED[1])

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one())
    return outcomes
