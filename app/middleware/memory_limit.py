"""Bounds the memory that clients hold: bodies that arrive and answers that wait to be taken."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import QueueFullError


class LimitMemory:
    """Refuses a body while the bodies and answers of all requests hold `max_bytes` or more.

    What a request holds counts until its answer is handed over. Requests without a body, such as
    those to /health, are never refused.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what this request holds, and let go of it at its end."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        own = 0

        def hold(size: int) -> None:
            nonlocal own
            own += size
            self._held += size

        async def count_body() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            if size and self._held >= self._max_bytes:
                raise QueueFullError(
                    f"bodies and answers in work fill {self._max_bytes} bytes", retry_after=1
                )
            hold(size)
            return message

        async def count_answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                hold(int(Headers(raw=message["headers"]).get("content-length", "0")))
            await send(message)

        try:
            await self.app(scope, count_body, count_answer)
        finally:
            self._held -= own
