"""Routes for work, routers of dialects, and the facts of each path for middleware.

Each path is registered once, with FastAPI. A route for work reads the body within limits; FastAPI
then validates it by the endpoint's signature, which also describes it in /openapi.json. If dialects
share a path, its endpoint takes a union of their bodies, which a field tells apart.
"""

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, Any, Final, TypeVar, get_args, get_type_hints

from fastapi import APIRouter, Depends, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from app.body import list_discriminators, read_body, schema_of
from app.context import NATIVE, Dialect, PathFacts, context_of
from app.error_responses import invalid_request_error
from app.handler import Call, cancel_on_disconnect, time_limit
from app.response_schemas import ErrorResponse
from app.schemas import RequestModel
from app.service import Service
from smart_embedder.errors import InvalidRequestError

Handler = TypeVar("Handler", bound=Callable[..., Any])
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


async def _declare_model(
    model: Annotated[str, Path(description="Any name of a model; see /v1/models.")],
) -> None:
    """Add the path's parameter to OpenAPI: the operations read it from the request."""


DECLARE_MODEL = Depends(_declare_model)


class WorkRoute(APIRoute):
    """A POST that asks for work; its endpoint takes a validated body and a `Call`."""

    @property
    def schemas(self) -> tuple[type[RequestModel], ...]:
        """The schemas of the body: one, or the members of a union, the default first."""
        body = get_type_hints(self.endpoint)["body"]
        return get_args(body) or (body,)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Read the body and answer it, within REQUEST_TIMEOUT and while the client is connected."""
        validate_and_answer, schemas = super().get_route_handler(), self.schemas
        reads_token_ids = any(schema.reads_token_ids for schema in schemas)

        async def answer(request: Request) -> Response:
            service: Service = request.app.state.service
            values, lock = service.max_json_values, service.body_lock
            async with time_limit(service.settings.request_timeout) as timeout:
                context = context_of(request.scope)
                decode = None
                if reads_token_ids and service.token_table is not None:
                    reserve = context.answer.add_body
                    decode = partial(service.token_table.decode_input, reserve=reserve)
                replaced = context.replaced
                value = await read_body(request, schemas, values, lock, replaced, decode=decode)
                schema = schema_of(value, schemas)
                if schema is not None:
                    context.dialects, context.endpoint = (schema.dialect,), schema.endpoint
                if schemas[0].reads_message_pack:
                    request = _without_content_type(request)
                async with AsyncExitStack() as leases:
                    call = Call(request, service, leases, value, timeout.when())
                    try:
                        return await cancel_on_disconnect(request, validate_and_answer(call))
                    except RequestValidationError as error:
                        raise _convert_error(error, value, schema, schemas) from None

        return answer


def _without_content_type(request: Request) -> Request:
    """Remove the content type of a parsed body, because FastAPI only accepts JSON."""
    headers = [pair for pair in request.scope["headers"] if pair[0] != b"content-type"]
    return Request({**request.scope, "headers": headers}, request.receive)


def _convert_error(
    error: RequestValidationError,
    value: Any,
    schema: type[RequestModel] | None,
    schemas: Sequence[type[RequestModel]],
) -> InvalidRequestError:
    """Convert FastAPI's error, whose locations begin with `body` and, in a union, with a tag."""
    prefix = 1 if len(schemas) == 1 else 2
    found = [item | {"loc": item["loc"][prefix:]} for item in error.errors()]
    if value is None:  # FastAPI reports `null` as a missing body.
        found = [{"type": "model_type", "loc": (), "input": None}]
    invalid = invalid_request_error(found, schema or schemas[0])
    if schema is not None or not isinstance(value, dict):
        return invalid
    message = (
        f"{invalid}; other APIs on this path have the field {list_discriminators(schemas[1:])}"
    )
    return InvalidRequestError(message, invalid.problems)


class Router(APIRouter):
    """The paths of one dialect; the id of an operation is the name of its function.

    `error` is the schema of its errors. `groups` describe the tags of its operations. Below the
    paths in `below`, errors have the dialect's shape even if there is no route. The paths of a
    public router need no token.
    """

    def __init__(
        self,
        dialect: Dialect = NATIVE,
        error: type[BaseModel] = ErrorResponse,
        groups: Sequence[Mapping[str, str]] = (),
        below: Sequence[str] = (),
        *,
        is_public: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(
            generate_unique_id_function=_operation_id,
            strict_content_type=False,  # `read_body` checks it.
            responses={"default": {"model": error, "description": "An error"}},
            **options,
        )
        self.dialect, self.groups, self.below = dialect, groups, below
        self.is_public = is_public

    def work(self, path: str, response: Any, **description: Any) -> Callable[[Handler], Handler]:
        """Register an endpoint for work, whose response has the schema `response`."""

        def register(endpoint: Handler) -> Handler:
            self.add_api_route(
                path,
                endpoint,
                methods=["POST"],
                route_class_override=WorkRoute,
                response_model=response,
                openapi_extra={"parameters": [_PRIORITY_PARAMETER]},
                **description,
            )
            return endpoint

        return register

    def get_and_head(self, path: str, **description: Any) -> Callable[[Handler], Handler]:
        """Register an endpoint for GET and, left out of the description, for HEAD."""

        def register(endpoint: Handler) -> Handler:
            self.head(path, include_in_schema=False)(endpoint)
            return self.get(path, **description)(endpoint)

        return register


def _operation_id(route: Any) -> str:
    return str(route.name)


class Paths:
    """The facts of each path, for middleware, which runs before FastAPI routes the request."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._facts: dict[str, PathFacts] = {}
        self._templates: dict[re.Pattern[str], PathFacts] = {}
        self._below = {prefix: router.dialect for router in routers for prefix in router.below}
        endpoints = []
        # Until the body has been read, errors have the shape of the first dialect of the path.
        for router in sorted(routers, key=lambda router: router.dialect is not NATIVE):
            for route in router.routes:
                if not isinstance(route, APIRoute):
                    continue
                facts = self._facts.setdefault(route.path, PathFacts())
                if route.param_convertors:
                    self._templates[route.path_regex] = facts
                facts.is_public |= router.is_public
                dialects = [router.dialect]
                if isinstance(route, WorkRoute):
                    dialects = [schema.dialect for schema in route.schemas]
                    if router.dialect is not NATIVE and router.dialect not in dialects:
                        raise TypeError(f"no body of {route.path} names {router.dialect.name}")
                    facts.endpoint = route.schemas[0].endpoint
                    endpoints += [schema.endpoint for schema in route.schemas]
                facts.dialects = tuple(dict.fromkeys((*facts.dialects, *dialects)))
        self.endpoints = tuple(dict.fromkeys(endpoints))

    def find(self, path: str) -> PathFacts:
        """The facts of `path`, which has no slash at its end."""
        if path in self._facts:
            return self._facts[path]
        for pattern, facts in self._templates.items():
            if pattern.match(path):
                return facts
        prefixes = [prefix for prefix in self._below if f"{path}/".startswith(prefix)]
        dialect = self._below[max(prefixes, key=len)] if prefixes else NATIVE
        return PathFacts(dialects=(dialect,))
