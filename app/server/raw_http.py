"""HTTP/1.1 as bytes, for requests that never reach the app."""

import uuid
from collections.abc import Iterable
from http import HTTPStatus

import orjson

Headers = Iterable[tuple[bytes, bytes]]

_UPGRADE_HEADERS = {b"upgrade", b"http2-settings"}


def error_response(status: HTTPStatus, code: str, detail: str) -> bytes:
    """A whole response with the usual error body; it announces that the connection closes."""
    request_id = uuid.uuid4().hex
    body = orjson.dumps({"detail": detail, "code": code, "request_id": request_id})
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nx-request-id: {request_id}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def head_without_upgrade(method: bytes, target: bytes, version: str, headers: Headers) -> bytes:
    """The head of a request without the client's offer to change the protocol."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        kept = _without_upgrade(value) if name == b"connection" else value
        if name not in _UPGRADE_HEADERS and (kept or not value):
            lines.append(b"%b: %b" % (name, kept))
    return b"\r\n".join([*lines, b"\r\n"])


def content_length(headers: Headers) -> int:
    """The announced length of the body; 0 where there is none."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


def _without_upgrade(connection: bytes) -> bytes:
    tokens = (token.strip() for token in connection.split(b","))
    return b", ".join(token for token in tokens if token.lower() not in _UPGRADE_HEADERS)
