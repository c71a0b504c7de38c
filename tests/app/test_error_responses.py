"""Errors name the field, what was sent and what is allowed, and never quote a text."""

# ruff: noqa: E501 - a case with what is said of it is one line

from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from httpx2 import ASGITransport, AsyncClient
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from structlog.testing import capture_logs

from app.body import parse_json
from app.context import (
    NATIVE,
    RERANK,
    Dialect,
    ErrorFacts,
    RequestContext,
    context_of,
)
from app.dialects.cohere import COHERE, DocumentsRequest
from app.dialects.openai import OPENAI, OpenAIEmbeddingRequest
from app.dialects.tei_schemas import TEI
from app.error_responses import (
    _response,
    install_error_handlers,
    internal_error_response,
)
from app.middleware.request_log import ProvideContext
from app.schemas import EmbeddingRequest, RequestModel, RerankBody
from smart_embedder.errors import InvalidRequestError
from tests.support.bodies import validate
from tests.support.paths import PATHS

LIST = '{"sentences":["What is hybrid search?"]}'
PAIR = '"passages":["A recipe for bread.","It joins two rankings."]}'


def problem(model: type[RequestModel], body: bytes) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate(parse_json(body, model), model)
    return caught.value


@pytest.mark.parametrize(
    ("model", "body", "message"),
    [
        (EmbeddingRequest, {"sentences": "one"}, f"the field sentences is a string of 3 characters: send a list of strings, as in {LIST}"),
        (EmbeddingRequest, {"sentences": ["a", 7]}, "the field sentences[1] is a number: send a string, or"),
        (EmbeddingRequest, {}, f"the field sentences is missing: send it, as in {LIST}"),
        (EmbeddingRequest, [], f"the body is a list of 0 items: send an object such as {LIST}"),
        (EmbeddingRequest, {"texts": ["a"]}, "the field sentences is missing: rename texts to sentences"),
        (EmbeddingRequest, {"sentance": ["a"]}, "the field sentences is missing: rename sentance to sentences"),
        (EmbeddingRequest, {"sentences": ["a"], "dense": True}, "there is no field dense here: did you mean return_dense? There are sentences, return_dense"),
        (EmbeddingRequest, {"sentences": ["a"], "return_colbret": True}, "there is no field return_colbret here: did you mean return_colbert?"),
        (EmbeddingRequest, {"sentences": ["a"], "zzz": 1}, "there is no field zzz here: there are sentences,"),
        (EmbeddingRequest, b'{"sentences": NaN}', "the field sentences is NaN: send a list of strings"),
        (RerankBody, b'{"query": "a", "passages": ["b"], "weights": {"dense": -1e999}}', "the field weights.dense is -Infinity: send a finite number"),
        (DocumentsRequest, b'{"query": "a", "documents": ["b"], "top_n": NaN}', "the field top_n is NaN: send a finite number"),
        (DocumentsRequest, b'{"query": "a", "documents": ["b"], "top_n": 1.5}', "the field top_n is a number: send a whole number"),
        (EmbeddingRequest, {"sentences": ["a"], "return_dense": 1}, "the field return_dense is a number: send true or false"),
        (RerankBody, {"query": "a", "passages": ["b"], "weights": {"dense": -1}}, "the field weights.dense is out of range: send at least 0"),
        (RerankBody, {"query": "a", "passages": ["b"], "weights": {"dense": 2e6}}, "the field weights.dense is out of range: send at most 1000000"),
        (RerankBody, {"query": "a", "passages": ["b"], "weights": {"sparce": 1}}, "there is no field sparce here: did you mean sparse? There are dense, sparse, colbert"),
        (RerankBody, {"query": "a", "weights": {"x": 1, "y": 1, "z": 1}, "pasages": ["b"]}, "the field passages is missing: rename pasages to passages"),
        (RerankBody, {"query": "a", "passages": ["b"], "weights": [1, 1, 1]}, 'the field weights is a list of 3 items: send an object such as {"dense":1'),
    ],
)  # fmt: skip
def test_the_error_of_an_invalid_field_says_what_to_send(model, body, message: str) -> None:
    sent = body if isinstance(body, bytes) else orjson.dumps(body)
    assert str(problem(model, sent)).startswith(message)


@pytest.mark.parametrize("unknown", [10, 11, 5000])
def test_only_ten_unknown_fields_are_reported_and_no_field_is_lost(unknown: int) -> None:
    """All errors would take longer than the work."""
    names = {f"unknown {i}": i for i in range(unknown)}
    known = {"sentences": ["a"], "return_dense": 1}
    for sent in (known | names, names | known):
        with pytest.raises(ValidationError) as caught:
            EmbeddingRequest.model_validate(sent)
        locations = [error["loc"] for error in caught.value.errors()]
        assert locations == [
            ("return_dense",),
            *((f"unknown {i}",) for i in range(min(unknown, 10))),
        ]
    ignored = OpenAIEmbeddingRequest.model_validate(names | {"input": "a", "dimensions": 7})
    assert (ignored.input, ignored.dimensions) == (["a"], 7)


SECRET = st.text("zZ\n\x1b\u202e", min_size=70, max_size=90).map(lambda text: f"{text}hush")
JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | SECRET,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SECRET, inner, max_size=3),
)
FIELDS = sorted({*EmbeddingRequest.model_fields, *RerankBody.model_fields, "texts", "dense"})


@given(
    st.sampled_from([EmbeddingRequest, RerankBody]),
    st.dictionaries(st.sampled_from(FIELDS) | SECRET, JSON, max_size=6) | JSON,
)
@settings(max_examples=60)
def test_no_error_quotes_a_text_of_the_request(model: type[RequestModel], body) -> None:
    """The name of an unknown field is cut before the secret, and line breaks are escaped."""
    sent = orjson.dumps(body)
    try:
        validate(parse_json(sent, model), model)
    except InvalidRequestError as error:
        answer = error
    else:
        return
    messages = [str(answer), *(problem["message"] for problem in answer.problems)]
    assert all(text.isprintable() and "hush" not in text for text in messages)
    assert len(answer.problems) <= 10


PROBLEMS = [{"pointer": "/input/0/text", "detail": "too long"}, {"pointer": "/model"}]


def error(code: str = "internal_error", status: int = 500, **more) -> ErrorFacts:
    return ErrorFacts("It failed.", code, status, **more)


def answer_in(failed: ErrorFacts, *dialects: Dialect) -> tuple[int, dict[str, Any]]:
    """The status and the body of an error on a path of these dialects."""
    context = RequestContext("r", "/rerank", RERANK, "192.0.2.1", dialects)
    answer = _response({"type": "http", "state": {"context": context}}, failed)
    return answer.status_code, orjson.loads(answer.body)


def test_the_native_error_lists_problems_if_there_are_any() -> None:
    plain = {"detail": "It failed.", "code": "internal_error", "request_id": "r"}
    assert answer_in(error(), NATIVE) == (500, plain)
    assert answer_in(error(problems=PROBLEMS), NATIVE) == (500, plain | {"errors": PROBLEMS})


@pytest.mark.parametrize(
    ("code", "status", "kind", "answered"),
    [
        ("unauthorized", 401, "authentication_error", 401),
        ("rate_limited", 429, "rate_limit_error", 429),
        ("forbidden", 403, "permission_error", 403),
        ("not_found", 404, "invalid_request_error", 404),
        ("invalid_request", 422, "invalid_request_error", 400),
        ("loading", 503, "server_error", 503),
    ],
)
def test_an_openai_error_has_a_type_and_the_field(code, status, kind, answered) -> None:
    failed = error(code, status, problems=PROBLEMS)
    about = {"message": "It failed.", "type": kind, "code": code}
    body = {"error": about | {"param": "input"}, "detail": "It failed."}
    assert answer_in(failed, OPENAI) == (answered, body)
    assert answer_in(failed, COHERE)[0] == answered


def test_a_cohere_error_has_jinas_detail_and_may_have_no_field() -> None:
    for problems in (None, [], [{"pointer": "", "detail": "no object"}]):
        assert answer_in(error(problems=problems), OPENAI)[1]["error"]["param"] is None
    body = {"message": "It failed.", "detail": "It failed.", "id": "r", "code": "invalid_request"}
    assert answer_in(error("invalid_request", 422), COHERE) == (400, body)


@pytest.mark.parametrize(
    ("code", "status", "kind", "answered"),
    [
        ("empty_input", 400, "Empty", 400),
        ("unauthorized", 401, "Unauthorized", 401),
        ("invalid_request", 422, "Validation", 422),
        ("rate_limited", 429, "Overloaded", 429),
        ("queue_full", 503, "Overloaded", 429),
        ("loading", 503, "Unhealthy", 503),
        ("inference_failed", 500, "Backend", 424),
        ("timeout", 504, "Backend", 504),
        ("not_found", 499, "Validation", 499),
        ("unknown", 500, "Backend", 500),
    ],
)
def test_a_tei_error_has_its_type(code, status, kind, answered) -> None:
    expected = {"error": "It failed.", "error_type": kind}
    assert answer_in(error(code, status), TEI) == (answered, expected)


def test_an_error_on_a_shared_path_has_the_fields_of_all_dialects() -> None:
    failed = error("invalid_request", 422)
    status, body = answer_in(failed, NATIVE, OPENAI)
    assert status == 422
    assert body["error"]["code"] == body["code"] == "invalid_request"
    assert (body["request_id"], body["error"]["type"]) == ("r", "invalid_request_error")
    # The message is in the native field and in that of OpenAI.
    assert orjson.dumps(body).count(b"It failed.") == 2
    assert answer_in(failed, OPENAI, NATIVE)[0] == 400
    assert answer_in(failed, TEI, OPENAI)[1]["error"] == "It failed."


def scope() -> dict[str, object]:
    context = RequestContext("an id", "/rerank", RERANK, "192.0.2.1")
    return {"type": "http", "state": {"context": context}}


def test_an_unexpected_error_is_500_and_reveals_nothing() -> None:
    of = scope()
    answer = internal_error_response(of, ValueError("secret"))
    body = orjson.loads(answer.body)
    assert (answer.status_code, body["code"]) == (500, "internal_error")
    assert body["request_id"] == "an id"
    assert "secret" not in str(body)
    assert (context_of(of).error_code, context_of(of).error_status) == ("internal_error", 500)


async def test_a_memory_error_is_503_wherever_it_is_raised() -> None:
    outside = internal_error_response(scope(), MemoryError())
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/rerank")
    async def endpoint() -> None:
        raise MemoryError("of something")

    app.add_middleware(ProvideContext, trusted_proxies=(), facts_of=PATHS.find)
    transport = ASGITransport(app)
    async with AsyncClient(transport=transport, base_url="http://service") as client:
        with capture_logs() as log:
            inside = await client.get("/rerank")
    assert [(entry["event"], entry["reason"]) for entry in log] == [
        ("request_out_of_memory", "of something")
    ]
    for answer, body in ((outside, orjson.loads(outside.body)), (inside, inside.json())):
        assert (answer.status_code, body["code"]) == (503, "out_of_memory")
        assert answer.headers["retry-after"] == "30"
        assert body["detail"].startswith("The service has too little memory for this request now;")
