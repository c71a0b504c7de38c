"""Counts the outcomes of requests; a request without any response is lost."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx2

# Statuses after which a client knows what to do.
REFUSALS = {*range(400, 500), 503, 504}
GOOD = {"sentences": ["search"], "return_colbert": False}
EMBED: tuple[str, dict[str, Any]] = (
    "/embeddings/",
    {"sentences": ["search vector"], "return_colbert": False},
)


@dataclass
class Tally:
    """Requests by status, and by code if they failed; some clients `left` on purpose."""

    sent: int = 0
    left: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def answered(self) -> int:
        return self.statuses[200]

    @property
    def refused(self) -> int:
        return sum(self.statuses[status] for status in REFUSALS)

    @property
    def failed(self) -> int:
        return self.statuses.total() - self.answered - self.refused

    @property
    def lost(self) -> int:
        return self.sent - self.left - self.statuses.total()

    def leave(self) -> None:
        """Count a request whose client left before the response."""
        self.sent += 1
        self.left += 1

    def note(self, status: int) -> None:
        """Count a request with this status."""
        self.sent += 1
        self.statuses[status] += 1

    def count(self, response: httpx2.Response) -> None:
        """Count a response to a request that is counted as sent; check the shape of errors."""
        self.statuses[response.status_code] += 1
        if response.status_code == 200:
            return
        problem = response.json()
        assert problem["detail"]
        assert problem["request_id"]
        self.codes[problem["code"]] += 1
        assert response.status_code != 503 or int(response.headers["retry-after"]) >= 1

    async def post(
        self, client: httpx2.AsyncClient, path: str, body: dict[str, Any], **headers: str
    ) -> int:
        """Send one request and count its outcome; returns 0 without a response."""
        self.sent += 1
        try:
            response = await client.post(path, json=body, headers=headers)
        except httpx2.TransportError as error:
            self.codes[type(error).__name__] += 1
            return 0
        self.count(response)
        return response.status_code
