"""An error in the shape of each dialect, as the servers that it imitates answer it."""

from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from httpx2 import ASGITransport, AsyncClient
from structlog.testing import capture_logs

from smart_embedder.api.context import (
    NATIVE,
    RERANK,
    Dialect,
    ErrorFacts,
    RequestContext,
    context_of,
)
from smart_embedder.api.dialects.cohere import COHERE
from smart_embedder.api.dialects.openai import OPENAI
from smart_embedder.api.dialects.tei import TEI
from smart_embedder.api.dialects.vllm import VLLM
from smart_embedder.api.errors import (
    _response,
    error_facts,
    install_error_handlers,
    unforeseen_error_response,
)
from smart_embedder.errors import QueueFullError
from smart_embedder.middleware.observe import ProvideContext
from tests.support.paths import PATHS

PROBLEMS = [{"pointer": "/input/0/text", "detail": "too long"}, {"pointer": "/model"}]


def error(code: str = "internal_error", status: int = 500, **more) -> ErrorFacts:
    return ErrorFacts("It failed.", code, status, **more)


def answer_in(failed: ErrorFacts, *dialects: Dialect) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error where a path has these dialects."""
    context = RequestContext("r", "/rerank", RERANK, "192.0.2.1", dialects)
    answer = _response({"type": "http", "state": {"context": context}}, failed)
    return answer.status_code, orjson.loads(answer.body)


def test_the_native_body_lists_problems_where_there_are_any() -> None:
    plain = {"detail": "It failed.", "code": "internal_error", "request_id": "r"}
    assert answer_in(error(), NATIVE) == (500, plain)
    invalid = error(problems=PROBLEMS)
    assert answer_in(invalid, NATIVE) == (500, plain | {"errors": PROBLEMS})


@pytest.mark.parametrize(
    ("code", "status", "kind", "answered"),
    [
        ("unauthorized", 401, "authentication_error", 401),
        ("forbidden", 403, "permission_error", 403),
        ("rate_limited", 429, "rate_limit_error", 429),
        ("not_found", 404, "invalid_request_error", 404),
        ("invalid_request", 422, "invalid_request_error", 400),
        ("text_too_long", 422, "invalid_request_error", 400),
        ("internal_error", 500, "server_error", 500),
        ("loading", 503, "server_error", 503),
    ],
)
def test_openais_error_has_a_type_and_the_field(code, status, kind, answered) -> None:
    failed = error(code, status, problems=PROBLEMS)
    about = {"message": "It failed.", "type": kind, "code": code}
    body = {"error": about | {"param": "input"}, "detail": "It failed.", **about}
    assert answer_in(failed, OPENAI) == (answered, body)
    number = about | {"param": "input", "code": answered}
    assert answer_in(failed, VLLM) == (answered, {"error": number, "object": "error", **number})
    assert answer_in(failed, COHERE)[0] == answered


@pytest.mark.parametrize("problems", [None, [], [{"pointer": "", "detail": "no object"}]])
def test_without_a_field_none_is_named(problems) -> None:
    _, body = answer_in(error(problems=problems), OPENAI)
    assert body["error"]["param"] is None


def test_coheres_error_has_its_message_and_jinas_detail() -> None:
    _, body = answer_in(error("invalid_request", 422), COHERE)
    told = {"message": "It failed.", "detail": "It failed."}
    assert body == told | {"id": "r", "code": "invalid_request"}


@pytest.mark.parametrize(
    ("code", "status", "kind", "answered"),
    [
        ("empty_input", 400, "Empty", 400),
        ("unauthorized", 401, "Unauthorized", 401),
        ("invalid_request", 422, "Validation", 422),
        ("rate_limited", 429, "Overloaded", 429),
        ("queue_full", 503, "Overloaded", 429),
        ("loading", 503, "Unhealthy", 503),
        ("draining", 503, "Unhealthy", 503),
        ("inference_failed", 500, "Backend", 424),
        ("out_of_memory", 503, "Backend", 424),
        ("timeout", 504, "Backend", 504),
        ("not_found", 499, "Validation", 499),
        ("unknown", 500, "Backend", 500),
    ],
)
def test_teis_error_says_what_kind_it_is(code, status, kind, answered) -> None:
    told = {"error": "It failed.", "error_type": kind}
    assert answer_in(error(code, status), TEI) == (answered, told)


def test_where_dialects_share_a_path_the_first_decides_and_all_can_be_read() -> None:
    failed = error("invalid_request", 422)
    status, body = answer_in(failed, NATIVE, OPENAI)
    assert status == 422
    assert body["error"]["code"] == body["code"] == "invalid_request"
    assert (body["request_id"], body["type"]) == ("r", "invalid_request_error")
    assert answer_in(failed, OPENAI, NATIVE)[0] == 400
    assert answer_in(failed, TEI, OPENAI)[1]["error"] == "It failed."
    assert answer_in(failed, OPENAI, TEI)[1]["error"]["type"]


def scope() -> dict[str, object]:
    context = RequestContext("an id", "/rerank", RERANK, "192.0.2.1")
    return {"type": "http", "state": {"context": context}}


def test_what_nobody_foresaw_reveals_nothing_and_is_500() -> None:
    of = scope()
    answer = unforeseen_error_response(of, ValueError("secret"))
    told = orjson.loads(answer.body)
    assert (answer.status_code, told["code"], told["request_id"]) == (
        500,
        "internal_error",
        "an id",
    )
    assert "secret" not in answer.body.decode()
    assert (context_of(of).error_code, context_of(of).error_status) == ("internal_error", 500)


async def test_a_lack_of_memory_is_temporary_wherever_it_is_noticed() -> None:
    outside = unforeseen_error_response(scope(), MemoryError())
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/rerank")
    async def endpoint() -> None:
        raise MemoryError("of something")

    app.add_middleware(ProvideContext, trusted_proxies=(), paths=PATHS)
    transport = ASGITransport(app)
    async with AsyncClient(transport=transport, base_url="http://service") as client:
        with capture_logs() as log:
            inside = await client.get("/rerank")
    assert [(each["event"], each["reason"]) for each in log] == [
        ("request_out_of_memory", "of something")
    ]
    for answer, told in ((outside, orjson.loads(outside.body)), (inside, inside.json())):
        assert (answer.status_code, told["code"]) == (503, "out_of_memory")
        assert answer.headers["retry-after"] == "30"
        assert told["detail"].startswith("The service has too little memory for this request now;")


def test_the_error_of_a_record_tells_when_to_try_again_only_where_that_helps() -> None:
    full = {"status": 503, "code": "queue_full", "detail": "It is full."}
    assert error_facts(QueueFullError("it is full.", retry_after=7)) == full | {"retry_after": 7}
    assert error_facts(QueueFullError("it is full")) == full
