"""/docs and /redoc without the internet: their scripts come from the package fastapi-offline."""

from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from app.api.context import context_of

_STATIC = "static/docs"
_OPENAPI = "openapi.json"

Page = Callable[[Request], Coroutine[None, None, HTMLResponse]]


def install_docs(app: FastAPI) -> None:
    """Serve the pages and everything that they load from this process.

    All links are relative, because a proxy may serve them below a path of its own.
    """
    app.mount(f"/{_STATIC}", StaticFiles(directory=_assets()), name="docs-assets")
    pages = {"/docs": _swagger_page(app), "/redoc": _redoc_page(app)}
    for path, page in pages.items():
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)


def _assets() -> Path:
    spec = find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("fastapi-offline is not installed")
    return Path(spec.origin).parent / "static"


def _swagger_page(app: FastAPI) -> Page:
    async def serve(request: Request) -> HTMLResponse:
        up = context_of(request.scope).way_up
        return get_swagger_ui_html(
            openapi_url=f"{up}{_OPENAPI}",
            title=f"{app.title} API",
            swagger_js_url=f"{up}{_STATIC}/swagger-ui-bundle.js",
            swagger_css_url=f"{up}{_STATIC}/swagger-ui.css",
            swagger_favicon_url=f"{up}{_STATIC}/favicon.png",
            # Only the groups are open, because there are many operations.
            swagger_ui_parameters={"docExpansion": "none"},
        )

    return serve


def _redoc_page(app: FastAPI) -> Page:
    async def serve(request: Request) -> HTMLResponse:
        up = context_of(request.scope).way_up
        return get_redoc_html(
            openapi_url=f"{up}{_OPENAPI}",
            title=f"{app.title} API",
            redoc_js_url=f"{up}{_STATIC}/redoc.standalone.js",
            redoc_favicon_url=f"{up}{_STATIC}/favicon.png",
            with_google_fonts=False,
        )

    return serve
