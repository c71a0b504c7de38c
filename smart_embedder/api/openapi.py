"""Paths and their OpenAPI description: what endpoints add, and the limits in force."""

import copy
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from smart_embedder.api.answers import ErrorResponse
from smart_embedder.api.context import NATIVE, Dialect, Endpoint, Operation, Paths, Place
from smart_embedder.api.handler import Call, Service, respond
from smart_embedder.api.schemas import OPENAI_TEXTS, RequestModel
from smart_embedder.engine.model import LoadedModels
from smart_embedder.observability.metrics import EMBEDDING_ENDPOINT, RERANK_ENDPOINT
from smart_embedder.settings.service import Settings

_LIMITS = """\
Dense, sparse and ColBERT vectors for hybrid search, on your own hardware.

<details><summary>The limits of this server</summary>

| limit | embeddings | rerank | set by |
|---|---|---|---|
| texts in a request | {settings.max_sentences_per_request:,}; at least {openai_texts:,} on \
OpenAI's paths | {settings.max_rerank_passages:,} \
| `MAX_SENTENCES_PER_REQUEST`, `MAX_RERANK_PASSAGES` |
| size of a request | {body} | {body} | `MAX_BODY_BYTES` |
| seconds of a request | {settings.request_timeout:g} | {settings.request_timeout:g}, \
of them {settings.rerank_gpu_timeout:g} in forwards | `REQUEST_TIMEOUT`, `RERANK_GPU_TIMEOUT` |
| tokens that are read | {embed_lengths} | {rerank_lengths} | `BGE_EMBED_MAX_LENGTH`, \
`QWEN_EMBED_MAX_LENGTH`, `BGE_RERANK_MAX_LENGTH`, `QWEN_RERANK_MAX_LENGTH` |
| tokens in one forward | {tokens} | {rerank_tokens} | `MAX_BATCH_TOKENS` |
| pairs in one forward |  | {pairs} | `QWEN_RERANK_BATCH_SIZE` |
| requests of all clients | {settings.max_queue_size:,} | {settings.rerank_max_queue:,} \
| `MAX_QUEUE_SIZE`, `RERANK_MAX_QUEUE` |
| requests of one client | {settings.rate_limit_burst_size:,} at once and \
{settings.rate_limit_requests_per_minute:,} a minute | counted together with embeddings \
| `RATE_LIMIT_BURST_SIZE`, `RATE_LIMIT_REQUESTS_PER_MINUTE` |

</details>"""
Answer = Callable[[Any, Call], Coroutine[Any, Any, Response]]
Handler = TypeVar("Handler", bound=Callable[..., Any])
_WORK_STATUSES = (400, 401, 403, 408, 412, 413, 415, 429, 500, 503, 504)
_BYTES = {"schema": {"type": "string", "format": "binary"}}


# Checks nothing, which `RequireTokenAndLimitRate` does: it adds the lock to the operation in the
# description.
_BEARER_NAME = "HTTPBearer"
BEARER = Security(
    HTTPBearer(
        auto_error=False,
        scheme_name=_BEARER_NAME,
        description="A token of API_TOKEN or API_TOKENS_FILE, where one is set",
    )
)
_PRIORITY_PARAMETER: Final[dict[str, Any]] = {
    "name": "Priority",
    "in": "header",
    "required": False,
    "description": (
        "RFC 9218 urgency: u=0 to u=3 is interactive, u=4 to u=7 is bulk, which gets a fifth of "
        "the device while interactive requests wait."
    ),
    "schema": {"type": "string", "default": "u=3"},
}


class Router(APIRouter):
    """The paths of one dialect, and `places` for what is known of them beside their routes.

    `error` is the form of its errors. `groups` describe the tags of its operations. `below` are
    beginnings of paths where errors have the dialect's shape, whether there is something or not.
    """

    def __init__(
        self,
        dialect: Dialect = NATIVE,
        error: type[BaseModel] = ErrorResponse,
        groups: Sequence[Mapping[str, str]] = (),
        below: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.dialect, self.error, self.groups, self.below = dialect, error, groups, below
        self.places: list[Place] = []

    def errors(self, *statuses: int) -> dict[int | str, dict[str, Any]]:
        """The part of an OpenAPI operation that describes its errors, which all have one form."""
        named = ", ".join(map(str, sorted(statuses)))
        return {"default": {"model": self.error, "description": f"An error, of status {named}"}}

    def describe_work(
        self,
        summary: str,
        schema: type[RequestModel],
        response: Any,
        statuses: Sequence[int] = (404,),
        media_types: Iterable[str] = (),
    ) -> dict[str, Any]:
        """The description of a route that reads a body of `schema` and does work for it.

        `statuses` are its errors beside those of every such route, `media_types` what it answers
        beside JSON.
        """
        responses = self.errors(*_WORK_STATUSES, *statuses)
        if content := dict.fromkeys(media_types, _BYTES):
            responses[200] = {"content": content}
        described = schema.model_json_schema(ref_template="{model}")
        described = _inline(described, described.pop("$defs", {}))
        body = {"required": True, "content": {"application/json": {"schema": described}}}
        return {
            "summary": summary,
            "response_model": response,
            "responses": responses,
            "openapi_extra": {"requestBody": body, "parameters": [_PRIORITY_PARAMETER]},
        }

    def work(
        self, path: str, endpoint: Endpoint, **description: Any
    ) -> Callable[[Handler], Handler]:
        """Register the function that answers what asks for work at `path`, as `endpoint`."""
        self.places.append(Place(path, (self.dialect,), endpoint))
        return self.post(path, **description)

    def operation(
        self,
        endpoint: Endpoint,
        field: str,
        schema: type[RequestModel],
        *paths: str,
        hidden: Sequence[str] = (),
        shared: Sequence[str] = (),
        **description: Any,
    ) -> Callable[[Answer], Operation]:
        """Let the decorated function answer bodies of `schema`.

        It has `paths`, `hidden` ones that the description leaves out, and `shared` ones of other
        dialects, where its bodies are told by `field`.
        """

        def register(answer: Answer) -> Operation:
            made = Operation(self.dialect, endpoint, field, schema, answer)
            named = {"name": answer.__name__, "description": inspect.getdoc(answer)} | description
            for path in (*paths, *hidden):
                how = named if path in paths else {"include_in_schema": False}
                self.add_api_route(path, respond, methods=["POST"], **how)
            self.places += [
                Place(path, (self.dialect,), endpoint, (made,))
                for path in (*paths, *hidden, *shared)
            ]
            return made

        return register

    def get_and_head(self, path: str, **description: Any) -> Callable[[Handler], Handler]:
        """Register an endpoint for GET and, without a description of its own, for HEAD."""

        def register(endpoint: Handler) -> Handler:
            self.head(path, include_in_schema=False)(endpoint)
            return self.get(path, **description)(endpoint)

        return register

    def health_check(self, path: str, **description: Any) -> Callable[[Handler], Handler]:
        """The same for a path that needs no token."""
        self.places.append(Place(path, (self.dialect,), is_health_check=True))
        return self.get_and_head(path, **description)


def paths_of(routers: Sequence[Router]) -> Paths:
    """The places of all paths of these."""
    paths = Paths()
    # The first dialect of a path decides how errors look before the body is known.
    for router in sorted(routers, key=lambda each: each.dialect is not NATIVE):
        for route in router.routes:
            if isinstance(route, APIRoute):
                paths.add(Place(route.path, (router.dialect,)))
        for place in router.places:
            paths.add(place)
        paths.below |= dict.fromkeys(router.below, router.dialect)
    return paths


def _inline(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace every reference by what it refers to."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inline(definitions[schema["$ref"]], definitions)
    return {key: _inline(value, definitions) for key, value in schema.items()}


def install_openapi(app: FastAPI, service: Service) -> None:
    """Serve /openapi.json, and so /docs and /redoc, with the limits and locks of this server."""
    fixed = app.openapi

    def describe() -> dict[str, Any]:
        description = fixed()
        limits = _describe_limits(service.settings, service.models)
        described = description | {
            "info": description["info"] | {"description": limits},
            "paths": _paths(description["paths"], service.settings),
        }
        return described if service.settings.asks_for_tokens else _without_locks(described)

    def serve(request: Request) -> JSONResponse:
        """In a thread: the first call of `fixed` takes a third of a second."""
        prefix = request.scope.get("root_path", "").rstrip("/")
        return JSONResponse(describe() | ({"servers": [{"url": prefix}]} if prefix else {}))

    app.openapi = describe  # type: ignore[method-assign]
    app.add_route("/openapi.json", serve, include_in_schema=False)


def _describe_limits(settings: Settings, models: LoadedModels | None) -> str:
    """The limits of a request in force: its size, its tokens and its time."""
    unknown = "known once the models are loaded"
    embed_lengths = rerank_lengths = tokens = rerank_tokens = pairs = unknown
    if models is not None:
        embedders = [each for each in (models.dense, models.embedder) if each is not None]
        embed_lengths = ", ".join(
            f"{each.max_length:,} of a text by {each.name}" for each in embedders
        )
        reranker, tokens, pairs = models.reranker, f"{models.max_batch_tokens:,}", "no limit"
        rerank_tokens = f"{models.max_rerank_tokens or models.max_batch_tokens:,}"
        if models.late_interaction:
            rerank_lengths = f"{models.embedder.max_length:,} of a text by {models.embedder.name}"
        elif reranker is None:
            rerank_lengths = "none: reranking is switched off"
        else:
            rerank_lengths = f"{reranker.max_length:,} of query and passage by {reranker.name}"
        if reranker is not None and reranker.max_batch_sequences is not None:
            pairs = f"{reranker.max_batch_sequences:,}"
    return _LIMITS.format(
        openai_texts=OPENAI_TEXTS,
        settings=settings,
        body=_binary_size(settings.max_body_bytes),
        embed_lengths=embed_lengths,
        rerank_lengths=rerank_lengths,
        tokens=tokens,
        rerank_tokens=rerank_tokens,
        pairs=pairs,
    )


def _binary_size(size: int) -> str:
    """Bytes in the largest unit of which they are a whole number."""
    units = ["bytes", "KiB", "MiB", "GiB"]
    while size % 1024 == 0 and len(units) > 1:
        size //= 1024
        del units[0]
    return f"{size:,} {units[0]}"


def _without_locks(description: dict[str, Any]) -> dict[str, Any]:
    """The description of a server that asks for no token."""
    components = {**description["components"]}
    del components["securitySchemes"]
    paths = {
        path: {
            method: {name: part for name, part in operation.items() if name != "security"}
            for method, operation in operations.items()
        }
        for path, operations in description["paths"].items()
    }
    return description | {"components": components, "paths": paths}


def _paths(paths: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """The paths with the limits of lists, and with locks on those that the settings protect."""
    paths = dict(paths)
    for path, field, max_items in (
        (EMBEDDING_ENDPOINT, "sentences", settings.max_sentences_per_request),
        (RERANK_ENDPOINT, "passages", settings.max_rerank_passages),
    ):
        paths[path] = {"post": copy.deepcopy(paths[path]["post"])}
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema["properties"][field]["maxItems"] = max_items
    for path in ("/stats", "/metrics") if settings.protect_metrics else ():
        paths[path] = {"get": paths[path]["get"] | {"security": [{_BEARER_NAME: []}]}}
    return paths
