"""Refuses bodies that are too large."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.context import context_of
from app.error_responses import error_response
from app.errors import BodyTooLargeError


class LimitBody:
    """Answers 413 as soon as a body is known to be larger than `max_bytes`."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the announced length, then count what arrives."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        context, announced = context_of(scope), Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            await error_response(scope, self._error())(scope, receive, send)
            return

        async def receive_limited() -> Message:
            message = await receive()
            if context.bytes_in > self._max_bytes:
                raise self._error()
            return message

        await self.app(scope, receive_limited, send)

    def _error(self) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body is larger than {self._max_bytes} bytes (MAX_BODY_BYTES): send fewer texts"
        )
