"""The shape of an error in each dialect: its body, and its status where that differs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from app.api.paths import Dialect


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """An error independent of the dialect.

    `status` is the native one; `problems` lists the faults of an invalid body.
    """

    message: str
    code: str
    status: int
    problems: list[dict[str, str]] | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """The body of an error, and the statuses that differ from the native ones, by code."""

    body: Callable[[ErrorFacts, str], dict[str, Any]]
    statuses: Mapping[str, int]


def body_of(error: ErrorFacts, request_id: str, dialects: Sequence[Dialect]) -> dict[str, Any]:
    """The body of the response, with the fields of all `dialects`."""
    bodies = [_SHAPES[dialect].body(error, request_id) for dialect in dialects]
    return {name: value for body in reversed(bodies) for name, value in body.items()}


def status_in(dialects: Sequence[Dialect], error: ErrorFacts) -> int:
    """The status that the first dialect gives to an error."""
    return _SHAPES[dialects[0]].statuses.get(error.code, error.status)


def _native(error: ErrorFacts, request_id: str) -> dict[str, Any]:
    body = {"detail": error.message, "code": error.code, "request_id": request_id}
    return body if error.problems is None else body | {"errors": error.problems}


# Servers that have no 422.
_BAD_REQUEST = {"invalid_request": 400, "text_too_long": 400}
_OPENAI_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def _openai(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    """OpenAI's `error`, and beside it what text-embeddings-inference and Voyage answer there."""
    about = _about(error)
    beside = {name: about[name] for name in ("message", "type", "code")}
    return {"error": about} | beside | {"detail": error.message}


def _about(error: ErrorFacts) -> dict[str, Any]:
    server_error = error.status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "server_error" if server_error else "invalid_request_error"
    pointer = error.problems[0]["pointer"] if error.problems else ""
    return {
        "message": error.message,
        "type": _OPENAI_TYPES.get(error.status, kind),
        "param": pointer.split("/")[1] if pointer else None,
        "code": error.code,
    }


def _cohere(error: ErrorFacts, request_id: str) -> dict[str, Any]:
    """Cohere's `message`, and Jina's `detail`."""
    return {"id": request_id, "message": error.message, "detail": error.message, "code": error.code}


def _vllm(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    """The newer shape, which is OpenAI's with a number, and the older one beside it."""
    about = _about(error) | {"code": _BAD_REQUEST.get(error.code, error.status)}
    return {"error": about, "object": "error"} | about


def _tei(error: ErrorFacts, _request_id: str) -> dict[str, Any]:
    return {"error": error.message, "error_type": _TEI_TYPES.get(error.code, _tei_type(error))}


def _tei_type(error: ErrorFacts) -> str:
    return "Backend" if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "Validation"


_TEI_TYPES = {
    "empty_input": "Empty",
    "unauthorized": "Unauthorized",
    "rate_limited": "Overloaded",
    "queue_full": "Overloaded",
    "loading": "Unhealthy",
    "model_not_loaded": "Unhealthy",
    "model_too_large": "Unhealthy",
    "draining": "Unhealthy",
    "unhealthy": "Unhealthy",
}
_TEI_STATUSES = {
    "queue_full": 429,
    "inference_failed": 424,
    "out_of_memory": 424,
    "reranker_disabled": 424,
}
_SHAPES = {
    Dialect.NATIVE: _Shape(_native, {}),
    Dialect.OPENAI: _Shape(_openai, _BAD_REQUEST),
    Dialect.COHERE: _Shape(_cohere, _BAD_REQUEST),
    Dialect.VLLM: _Shape(_vllm, _BAD_REQUEST),
    Dialect.TEI: _Shape(_tei, _TEI_STATUSES),
}
