"""/docs and /redoc without the internet: their scripts come from the package fastapi-offline."""

from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

_STATIC = "/static/docs"

Page = Callable[[], Awaitable[HTMLResponse]]


def install_docs(app: FastAPI) -> None:
    """Serve the pages and everything that they load from this process."""
    app.mount(_STATIC, StaticFiles(directory=_assets()), name="docs-assets")
    pages = {"/docs": _swagger_page(app), "/redoc": _redoc_page(app)}
    for path, page in pages.items():
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)


def _assets() -> Path:
    spec = find_spec("fastapi_offline")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("fastapi-offline is not installed")
    return Path(spec.origin).parent / "static"


def _swagger_page(app: FastAPI) -> Page:
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=f"{app.title} API",
        swagger_js_url=f"{_STATIC}/swagger-ui-bundle.js",
        swagger_css_url=f"{_STATIC}/swagger-ui.css",
        swagger_favicon_url=f"{_STATIC}/favicon.png",
        # The groups alone: there are many operations.
        swagger_ui_parameters={"docExpansion": "none"},
    )
    return _serve(page)


def _redoc_page(app: FastAPI) -> Page:
    page = get_redoc_html(
        openapi_url="/openapi.json",
        title=f"{app.title} API",
        redoc_js_url=f"{_STATIC}/redoc.standalone.js",
        redoc_favicon_url=f"{_STATIC}/favicon.png",
        with_google_fonts=False,
    )
    return _serve(page)


def _serve(page: HTMLResponse) -> Page:
    async def serve() -> HTMLResponse:
        return page

    return serve
