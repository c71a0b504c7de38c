"""Routes for work, routers of dialects, and what middleware knows of a path before it is routed.

A path is registered once, with FastAPI. A route for work reads the body within limits and leaves
validation to FastAPI, by the endpoint's signature, which also describes it in /openapi.json. Where
bodies of several dialects share a path, its endpoint takes a union that a field tells apart.
"""

import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar, get_args, get_type_hints

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from app.body import list_discriminators, read_json, schema_of
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


class WorkRoute(APIRoute):
    """A POST that asks for work: its endpoint takes a valid body and a `Call`.

    `schemas` are those of the body: one, or those of a union, where the first is the default.
    """

    @property
    def schemas(self) -> tuple[type[RequestModel], ...]:
        """Of the body in the endpoint's signature."""
        body = get_type_hints(self.endpoint)["body"]
        return get_args(body) or (body,)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Read the body and answer it, all within REQUEST_TIMEOUT and while the client stays."""
        validate_and_answer, schemas = super().get_route_handler(), self.schemas

        async def answer(request: Request) -> Response:
            service: Service = request.app.state.service
            values, lock = service.max_json_values, service.body_lock
            async with time_limit(service.settings.request_timeout) as timeout:
                context = context_of(request.scope)
                value = await read_json(request, schemas, values, lock, context.replaced)
                schema = schema_of(value, schemas)
                if schema is not None:
                    context.dialects, context.endpoint = (schema.dialect,), schema.endpoint
                async with AsyncExitStack() as leases:
                    call = Call(request, service, leases, value, timeout.when())
                    try:
                        return await cancel_on_disconnect(request, validate_and_answer(call))
                    except RequestValidationError as error:
                        raise _as_invalid(error, value, schema, schemas) from None

        return answer


def _as_invalid(
    error: RequestValidationError,
    value: Any,
    schema: type[RequestModel] | None,
    schemas: Sequence[type[RequestModel]],
) -> InvalidRequestError:
    """The error for a body that is not valid, whose locations begin with `body` and a tag."""
    beginning = 1 if len(schemas) == 1 else 2
    found = [item | {"loc": item["loc"][beginning:]} for item in error.errors()]
    if value is None:  # FastAPI says that it is missing.
        found = [{"type": "model_type", "loc": (), "input": None}]
    invalid = invalid_request_error(found, schema or schemas[0])
    if schema is not None or not isinstance(value, dict):
        return invalid
    message = f"{invalid}; other APIs on this path are told by {list_discriminators(schemas[1:])}"
    return InvalidRequestError(message, invalid.problems)


class Router(APIRouter):
    """The paths of one dialect; the id of an operation is the name of its function.

    `error` is the form of its errors. `groups` describe the tags of its operations. `below` are
    beginnings of paths where errors have the dialect's shape, whether there is something or not.
    Paths of a public router need no token.
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
        # Whether a body must have a type, `read_json` decides.
        super().__init__(
            generate_unique_id_function=_name_of,
            strict_content_type=False,
            responses={"default": {"model": error, "description": "An error"}},
            **options,
        )
        self.dialect, self.groups, self.below = dialect, groups, below
        self.is_public = is_public

    def work(self, path: str, response: Any, **description: Any) -> Callable[[Handler], Handler]:
        """Register an endpoint for work, which answers with a `response`."""

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
        """Register an endpoint for GET and, without a description of its own, for HEAD."""

        def register(endpoint: Handler) -> Handler:
            self.head(path, include_in_schema=False)(endpoint)
            return self.get(path, **description)(endpoint)

        return register


def _name_of(route: Any) -> str:
    return str(route.name)


class Paths:
    """What middleware knows of each path, since it acts before FastAPI routes the request."""

    def __init__(self, routers: Sequence[Router]) -> None:
        self._facts: dict[str, PathFacts] = {}
        self._templates: dict[re.Pattern[str], PathFacts] = {}
        self._below = {begin: router.dialect for router in routers for begin in router.below}
        endpoints = []
        # The first dialect of a path decides how errors look before the body is known.
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
        below = (each for begin, each in self._below.items() if f"{path}/".startswith(begin))
        return PathFacts(dialects=(next(below, NATIVE),))
