"""GET /, /ui, and /docs and /redoc, whose scripts come from the package fastapi-offline."""

import gzip
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

import orjson
from fastapi import FastAPI, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from app.context import EXTRACT, context_of
from app.headers import choose_preferred, parse_preferences, read_preference
from app.http_metrics import EMBEDDING_ENDPOINT, RERANK_ENDPOINT
from app.response_schemas import IndexResponse
from app.routing import Router
from app.service import ServiceDep
from smart_embedder import __version__

_STATIC = "static/docs"
_OPENAPI = "openapi.json"
# Swagger UI has a dark theme, but its switch is in a top bar that FastAPI's page leaves out.
_HEAD = b"""<style>
:root { color-scheme: light dark; }
body { margin: 0; }
.swagger-ui .info { margin: 24px 0; }
.swagger-ui .scheme-container { margin: 0 0 16px; padding: 12px 0; box-shadow: none; }
.swagger-ui .info__description { overflow-x: auto; font-size: 14px; }
.swagger-ui .info__description td { padding: 3px 16px 3px 0 !important; line-height: 1.7; }
.swagger-ui .response-col_links { display: none !important; }
@media (max-width: 640px) {
  .swagger-ui .opblock-tag { flex-wrap: wrap; }
  .swagger-ui .opblock-tag small { flex: 1 0 100%; order: 1; padding: 4px 0 0; }
  .swagger-ui table:is(.parameters, .responses-table),
  .swagger-ui table:is(.parameters, .responses-table) > tbody,
  .swagger-ui table:is(.parameters, .responses-table) > tbody > tr,
  .swagger-ui table:is(.parameters, .responses-table) > tbody > tr > td {
    display: block; width: auto; max-width: none;
  }
  .swagger-ui table:is(.parameters, .responses-table) > thead { display: none; }
}
</style>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", paint);
paint();
</script>
</head>"""
_OPEN_GROUPS = """<script>
for (const tag of %s) ui.layoutActions.show(["operations-tag", tag], true);
</script>
</body>"""


def install_docs(app: FastAPI, groups: Sequence[str]) -> None:
    """Serve /docs and /redoc, and the scripts that they load.

    /docs expands the operations of `groups`. All links are relative, because a proxy may serve the
    pages below a prefix.
    """
    package = find_spec("fastapi_offline")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("fastapi-offline is not installed")
    assets = StaticFiles(directory=Path(package.origin).parent / "static")
    app.mount(f"/{_STATIC}", assets, name="docs-assets")

    async def swagger(request: Request) -> HTMLResponse:
        up = context_of(request.scope).relative_root
        page = get_swagger_ui_html(
            openapi_url=f"{up}{_OPENAPI}",
            title=f"{app.title} API",
            swagger_js_url=f"{up}{_STATIC}/swagger-ui-bundle.js",
            swagger_css_url=f"{up}{_STATIC}/swagger-ui.css",
            swagger_favicon_url=f"{up}{_STATIC}/favicon.png",
            swagger_ui_parameters={"docExpansion": "none", "defaultModelsExpandDepth": 0},
        )
        open_groups = (_OPEN_GROUPS % orjson.dumps(groups).decode()).encode()
        content = bytes(page.body).replace(b"</head>", _HEAD).replace(b"</body>", open_groups)
        return HTMLResponse(content)

    async def redoc(request: Request) -> HTMLResponse:
        up = context_of(request.scope).relative_root
        return get_redoc_html(
            openapi_url=f"{up}{_OPENAPI}",
            title=f"{app.title} API",
            redoc_js_url=f"{up}{_STATIC}/redoc.standalone.js",
            redoc_favicon_url=f"{up}{_STATIC}/favicon.png",
            with_google_fonts=False,
        )

    for path, page in (("/docs", swagger), ("/redoc", redoc)):
        app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)


router = Router(tags=["operation"], is_public=True)
UI_PATH = "/ui"
_FOLDER = Path(__file__).resolve().parents[1] / "ui"
_INDEX = "index.html"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Nothing from other origins, nothing inline, no framing.
_CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img", "font", "worker")),
        *(f"{name} 'none'" for name in ("frame-ancestors", "base-uri", "form-action")),
    )
)
_HEADERS = {
    "Cache-Control": "no-cache",  # Browsers revalidate the files before each use.
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    gzipped: bytes
    media_type: str
    etag: str


def install_ui(app: FastAPI) -> None:
    """Serve the page at /ui, and its files below /ui/."""
    files = {
        path.relative_to(_FOLDER).as_posix(): _build_file(path.read_bytes(), path.name)
        for path in _FOLDER.rglob("*")
        if path.suffix in _MEDIA_TYPES
    }
    # At /ui/ relative links begin one level deeper than at /ui.
    nested_index = _build_file(
        re.sub(rb'(href|src)="(?=ui|docs)', rb'\1="../', files[_INDEX].content), _INDEX
    )

    async def serve(request: Request) -> Response:
        name = request.path_params.get("name", _INDEX)
        is_nested = name == _INDEX and context_of(request.scope).relative_root
        file = nested_index if is_nested else files.get(name)
        if file is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        headers = _HEADERS | {"ETag": file.etag}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        accepted = read_preference(request.headers, "accept-encoding")
        if choose_preferred(accepted, ("gzip", "identity")) != "gzip":
            return Response(file.content, headers=headers, media_type=file.media_type)
        headers |= {"Content-Encoding": "gzip"}
        return Response(file.gzipped, headers=headers, media_type=file.media_type)

    for path in (UI_PATH, f"{UI_PATH}/{{name:path}}"):
        app.add_api_route(path, serve, methods=["GET", "HEAD"], include_in_schema=False)


def _build_file(content: bytes, name: str) -> _File:
    # Weak, since the plain and the gzipped bytes share it.
    etag = f'W/"{sha256(content).hexdigest()[:32]}"'
    return _File(content, gzip.compress(content, mtime=0), _MEDIA_TYPES[Path(name).suffix], etag)


@router.get_and_head("/", summary="Name, version and paths", response_model=IndexResponse)
async def show_index(request: Request, service: ServiceDep) -> Response:
    """Return the service's name, version and paths; browsers are redirected to /ui."""
    vary, prefix = {"Vary": "Accept"}, context_of(request.scope).prefix
    if service.settings.ui and _wants_html(request):
        # Relative, unless a proxy has sent the prefix that it removes from paths.
        location = f"{prefix}{UI_PATH}" if prefix else UI_PATH.removeprefix("/")
        return RedirectResponse(location, HTTPStatus.SEE_OTHER, vary)
    paths = {
        "embeddings": EMBEDDING_ENDPOINT,
        "rerank": RERANK_ENDPOINT,
        "extract": EXTRACT.path,
        "documentation": "/docs",
        "openapi": "/openapi.json",
        "health": "/health",
        "stats": "/stats",
        "metrics": "/metrics",
    }
    if service.settings.ui:
        paths["page"] = UI_PATH
    paths = {name: prefix + path for name, path in paths.items()}
    content = {"service": "Smart Embedder", "version": __version__, "paths": paths}
    return JSONResponse(content, headers=vary)


def _wants_html(request: Request) -> bool:
    """Whether the Accept header prefers text/html to JSON, as browsers' headers do."""
    weights = parse_preferences(read_preference(request.headers, "accept"))
    return weights.get("text/html", 0) > weights.get("application/json", 0)
