"""Checks of what is refused, and of what every answer carries."""

from http import HTTPStatus
from typing import Any

from tools.smoke.target import (
    EMBED,
    RERANK,
    Access,
    Skip,
    Target,
    describe,
    expect,
    expect_that,
    read_error,
)

_DEFAULT_MAX_TEXTS = 1024
_WRONG = "wrong-" * 4


def empty_list_is_400(target: Target) -> None:
    """An empty list of texts is 400."""
    expect("the code", target.refused(EMBED, {"sentences": []}, 400).code, "empty_input")


def malformed_is_422(target: Target) -> None:
    """What is no JSON, lacks a field, has an unknown one or one of a wrong type, is 422."""
    bodies: tuple[Any, ...] = (
        b"{no json",
        {},
        {"sentences": ["a"], "unknown": 1},
        {"sentences": "a"},
        {"sentences": [1]},
        {"sentences": ["a"], "return_dense": "yes"},
    )
    for body in bodies:
        expect("the code", target.refused(EMBED, body, 422).code, "invalid_request")


def too_many_texts_are_422(target: Target) -> None:
    """More texts than are allowed are 422."""
    # No vectors are asked for: a service that allows so many texts then does no work either.
    nothing = dict.fromkeys(("return_dense", "return_sparse", "return_colbert"), False)
    _expect_too_many(target, EMBED, {"sentences": ["a"] * (_DEFAULT_MAX_TEXTS + 1)} | nothing)


def too_many_passages_are_422(target: Target) -> None:
    """More passages than are allowed are 422."""
    weightless = {"weights": {"dense": 0, "sparse": 0, "colbert": 0}}
    body = {"query": "a", "passages": ["a"] * (_DEFAULT_MAX_TEXTS + 1)} | weightless
    _expect_too_many(target, RERANK, body)


def _expect_too_many(target: Target, path: str, body: dict[str, Any]) -> None:
    detail = target.refused(path, body, 422).detail
    if "at most" not in detail:
        raise Skip(f"more than {_DEFAULT_MAX_TEXTS} are allowed here")


def huge_body_is_413(target: Target) -> None:
    """A body that is announced as far too large is 413 before it is sent."""
    target.require_healthy()
    answer = target.announce_huge_body()
    target.require_access(answer)
    expect("the status", answer.status_code, 413)


def unknown_path_is_404(target: Target) -> None:
    """An unknown path is 404 in the one shape of errors."""
    answer = target.get("/no/such/page")
    target.require_access(answer)
    expect("the status", answer.status_code, 404)
    read_error(answer)


def missing_or_wrong_token_is_401(target: Target) -> None:
    """Without a token, or with a wrong one, work is 401 with WWW-Authenticate: Bearer."""
    if target.access is Access.OPEN and not target.token:
        raise Skip("no token is asked for")
    for token in ("", _WRONG):
        # Empty: a service that asks for no token then does no work.
        answer = target.post(EMBED, {"sentences": []}, token=token)
        note = " (a token was given, and this service asks for none)"
        expected = f"401{note if target.access is Access.OPEN else ''}"
        refused = answer.status_code == HTTPStatus.UNAUTHORIZED
        expect_that("the status", refused, expected, describe(answer))
        expect("WWW-Authenticate", answer.headers.get("www-authenticate"), "Bearer")
        expect("the code", read_error(answer).code, "unauthorized")


def token_opens_the_service(target: Target) -> None:
    """The token that was given opens the service; where none was, none is asked for."""
    opened = target.access in {Access.OPEN, Access.GRANTED}
    expect_that("the service", opened, "an answer", str(target.access))


def health_is_public(target: Target) -> None:
    """/health and the docs ask for no token."""
    if not target.token:
        raise Skip("no token was given")
    token, target.token = target.token, None
    try:
        statuses = {page: target.get(page).status_code for page in ("/health", "/docs")}
    finally:
        target.token = token
    refused = [page for page, status in statuses.items() if status == HTTPStatus.UNAUTHORIZED]
    expect("pages that ask for one", refused, [])


def request_id_is_the_clients(target: Target) -> None:
    """The client's own X-Request-ID comes back, and every answer carries one."""
    answer = target.post(EMBED, {"sentences": []}, headers={"X-Request-ID": "smoke-check-1"})
    expect("X-Request-ID", answer.headers.get("x-request-id"), "smoke-check-1")
    expect("answers without one", target.without_id, [])


def refusals_say_when_to_come_again(target: Target) -> None:
    """Every 429 and 503 of this run that may pass carried a Retry-After in whole seconds."""
    if not target.refusals:
        raise Skip("there was none")
    expect("those without one", target.without_retry_after, [])


CHECKS = (
    token_opens_the_service,
    missing_or_wrong_token_is_401,
    health_is_public,
    empty_list_is_400,
    malformed_is_422,
    too_many_texts_are_422,
    too_many_passages_are_422,
    huge_body_is_413,
    unknown_path_is_404,
)
LAST_CHECKS = (request_id_is_the_clients, refusals_say_when_to_come_again)
