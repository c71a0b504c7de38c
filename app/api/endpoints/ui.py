"""The page at /ui. Its files are read once, so no request can name another file of the disk."""

import re
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from app.api.context import context_of

UI_PATH = "/ui"
_FOLDER = Path(__file__).resolve().parents[2] / "ui"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no frame around it.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img", "font", "worker")),
        *(f"{what} 'none'" for what in ("frame-ancestors", "base-uri", "form-action")),
    )
)
_HEADERS = {
    "Cache-Control": "no-cache",  # A browser keeps the files, and asks whether they changed.
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def install_ui(app: FastAPI) -> None:
    """Serve the page at /ui, and its files below."""
    files = _read_files()
    # For /ui/, whose relative links begin a level deeper.
    deeper = _file_of(
        re.sub(rb'(href|src)="(?=ui|docs)', rb'\1="../', files[_INDEX].content), _INDEX
    )

    async def serve(request: Request) -> Response:
        name = request.path_params.get("name", _INDEX)
        is_deeper = name == _INDEX and context_of(request.scope).way_up
        file = deeper if is_deeper else files.get(name)
        if file is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        headers = _HEADERS | {"ETag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(file.content, headers=headers, media_type=file.media_type)

    for path in (UI_PATH, f"{UI_PATH}/{{name:path}}"):
        app.add_api_route(path, serve, methods=["GET", "HEAD"], include_in_schema=False)


def _read_files() -> dict[str, _File]:
    return {
        path.relative_to(_FOLDER).as_posix(): _file_of(path.read_bytes(), path.name)
        for path in _FOLDER.rglob("*")
        if path.suffix in _MEDIA_TYPES
    }


def _file_of(content: bytes, name: str) -> _File:
    digest = sha256(content).hexdigest()
    return _File(content, _MEDIA_TYPES[Path(name).suffix], f'"{digest[:32]}"')
