"""Endpoints that are read: what GET answers, HEAD answers without its body."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def readable(router: APIRouter, path: str, **description: Any) -> Callable[[Endpoint], Endpoint]:
    """Register an endpoint for GET, as `router.get` does, and for HEAD, which is not described."""

    def register(endpoint: Endpoint) -> Endpoint:
        router.head(path, include_in_schema=False)(endpoint)
        return router.get(path, **description)(endpoint)

    return register
