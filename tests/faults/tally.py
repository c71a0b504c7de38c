"""Counts what became of every request; one that got neither an answer nor a refusal is lost.

A refusal is any 4xx, or 503 or 504: the client knows what happened and what to do.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import httpx2

from tests.faults.record import Row, record
from tests.support.server import RunningServer

REFUSALS = {*range(400, 500), 503, 504}
GOOD = {"sentences": ["search"], "return_colbert": False}


class Tally:
    """Requests sent by clients that waited for an answer, and those that left on purpose."""

    def __init__(self) -> None:
        self.sent = 0
        self.abandoned = 0
        self.statuses: Counter[int] = Counter()
        record(self.row)

    def row(self) -> Row:
        """For the table of all fault tests."""
        return Row(self.sent, self.answered, self.refused, left=self.abandoned, lost=self.lost)

    def leave(self) -> None:
        """A client that left before it could be answered: sent, and nobody waits."""
        self.sent += 1
        self.abandoned += 1

    def note(self, status: int) -> None:
        """A request that was sent and got this status."""
        self.sent += 1
        self.statuses[status] += 1

    def ask(self, client: httpx2.Client, **body: object) -> httpx2.Response | None:
        """Send a good request; no answer at all leaves it lost."""
        self.sent += 1
        try:
            response = client.post("/embeddings/", json=GOOD | body)
        except httpx2.TransportError:
            return None
        self.statuses[response.status_code] += 1
        return response

    @property
    def answered(self) -> int:
        return self.statuses[HTTPStatus.OK]

    @property
    def refused(self) -> int:
        return sum(self.statuses[status] for status in REFUSALS)

    @property
    def lost(self) -> int:
        return self.sent - self.abandoned - self.answered - self.refused

    def __str__(self) -> str:
        return (
            f"{self.sent} sent, {self.answered} answered, {self.refused} refused, "
            f"{self.abandoned} left, {self.lost} lost ({dict(self.statuses)})"
        )


@contextmanager
def tally(server: RunningServer) -> Iterator[Tally]:
    """Healthy before, healthy after, none lost, and nothing in the log that nobody foresaw."""
    assert _health(server) == HTTPStatus.OK
    counts = Tally()
    yield counts
    assert counts.lost == 0, counts
    assert _health(server) == HTTPStatus.OK, counts
    assert "Traceback" not in server.log, server.log
    print(counts)  # noqa: T201 - pytest shows it when asked to


def _health(server: RunningServer) -> int:
    return server.get("/health").status_code
