"""A response that does not fit its request raises `unexpected_answer`, whatever is wrong with it.

tests/fuzzing compares the reader of safetensors with the package.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smart_embedder_client import Client, SmartEmbedderError
from smart_embedder_client.safetensors import MEDIA_TYPE, METADATA_KEY

TEXTS = ["the river", "", "a train in winter"]
REQUESTS: dict[str, dict[str, Any]] = {
    "embed": {},
    "embed, dense": {"return_sparse": False},
    "embed, all kinds": {"return_colbert": True, "return_tokens": True, "muvera": "document"},
    "embed, int8": {"output_dtype": "int8", "return_colbert": True, "return_dense": True},
    "rerank": {},
    "tokenize": {},
    "health": {},
}


def answering(content: bytes, status: int = 200, **headers: str | bytes) -> Client:
    """A client of a server that gives all requests the same response."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, headers=sent, content=content)

    http = httpx.Client(transport=httpx.MockTransport(answer))
    return Client("http://127.0.0.1:8000", max_retries=0, http=http)


def ask(client: Client, name: str) -> Any:
    """Send one of the requests."""
    return {
        "embed": lambda: client.embed(TEXTS, **REQUESTS[name]),
        "rerank": lambda: client.rerank("river", TEXTS),
        "tokenize": lambda: client.tokenize(TEXTS),
        "health": client.health,
    }[name.partition(",")[0]]()


def check_result(name: str, answer: Any) -> None:
    """Whether the result fits the request, checked independently of the client."""
    if name.startswith("embed"):
        assert len(answer.dense) == len(TEXTS)
        assert answer.sparse is None or len(answer.sparse) == len(TEXTS)
        assert np.isfinite(answer.dense).all()
        if "return_colbert" in REQUESTS[name]:
            assert len(answer.colbert) == len(TEXTS)
        for sparse in answer.sparse or ():
            assert len(sparse.indices) == len(sparse.values)
    elif name == "rerank":
        assert sorted(answer.indices.tolist()) == [0, 1, 2]
        assert answer.passages == [TEXTS[i] for i in answer.indices]
        assert np.isfinite(answer.scores).all()
    elif name == "tokenize":
        for tokens, text in zip(answer, TEXTS, strict=True):
            assert tokens.spans.shape == (len(tokens.ids), 2)
            assert ((tokens.spans >= 0) & (tokens.spans <= len(text))).all()


@pytest.fixture(scope="module")
def honest(server) -> Iterator[dict[str, httpx.Response]]:
    """The responses of the service."""
    answers: dict[str, httpx.Response] = {}
    sent: list[httpx.Response] = []
    with (
        httpx.Client(event_hooks={"response": [sent.append]}) as http,
        Client(server.url, http=http) as client,
    ):
        for name in REQUESTS:
            check_result(name, ask(client, name))
            answers[name] = sent[-1]
        yield answers


# Values that have broken parsers.
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 3, 2**31, 10**30, 0.5, float("nan"), float("inf"), "", "[" * 50]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def damage(data: st.DataObject, value: Any) -> Any:
    """Replace, change, repeat or remove one value of the JSON."""
    places: list[Any] = sorted(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        places = [*range(len(value))]
    if places and data.draw(st.integers(0, 4)):
        place, copy = data.draw(st.sampled_from(places)), value.copy()
        if data.draw(st.integers(0, 4)):
            copy[place] = damage(data, value[place])
        elif isinstance(value, dict) or data.draw(st.booleans()):
            del copy[place]
        else:
            copy.insert(place, value[place])
        return copy
    if type(value) is int and data.draw(st.booleans()):
        return value + data.draw(st.sampled_from([-1, 1, 8, 2**40]))
    return data.draw(VALUES)


def damaged_file(data: st.DataObject, content: bytes) -> bytes:
    """Damage the header, the metadata or the numbers of a safetensors file."""
    start = 8 + int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8:start]), content[start:]
    part = data.draw(st.sampled_from(["header", "metadata", "numbers"]))
    if part == "header":
        header = damage(data, header)
    elif part == "metadata":
        metadata = damage(data, json.loads(header["__metadata__"][METADATA_KEY]))
        header["__metadata__"][METADATA_KEY] = json.dumps(metadata)
    else:
        place = data.draw(st.integers(0, len(numbers)))
        numbers = numbers[:place] + data.draw(st.binary(max_size=9)) + numbers[place + 8 :]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


@pytest.mark.parametrize("name", REQUESTS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_response_is_valid_or_an_error(honest, name: str, data) -> None:
    content = honest[name].content
    if name.startswith("embed"):
        content = damaged_file(data, content)
    else:
        content = json.dumps(damage(data, json.loads(content))).encode()
    with answering(content, content_type=honest[name].headers["content-type"]) as client:
        try:
            found = ask(client, name)
        except SmartEmbedderError as error:
            assert error.code == "unexpected_answer"  # noqa: PT017 - there may be none
        else:
            check_result(name, found)


DEEP = b"[" * 100_000


@pytest.mark.parametrize("body", [b"", b"<html>", DEEP, b'{"detail": ' + DEEP, b"\xff"])
@pytest.mark.parametrize(("name", "status"), [("embed", 200), ("rerank", 302), ("health", 503)])
def test_a_response_that_is_no_json_is_an_error(name: str, body: bytes, status: int) -> None:
    with (
        answering(body, status, content_type=MEDIA_TYPE) as client,
        pytest.raises(SmartEmbedderError, match="unexpected_answer"),
    ):
        ask(client, name)


@pytest.mark.parametrize("name", ["embed", "embed, dense"])
def test_vectors_of_more_or_fewer_texts_are_an_error(honest, name: str) -> None:
    with answering(honest[name].content, content_type=MEDIA_TYPE) as client:
        assert len(client.embed(TEXTS).dense) == len(TEXTS)
        for texts in (TEXTS[:1], [*TEXTS, "another"], []):
            with pytest.raises(SmartEmbedderError, match="the vectors cannot be read"):
                client.embed(texts)
        for options in ({"return_colbert": True}, {"muvera": "query"}, {"output_dtype": "int8"}):
            with pytest.raises(SmartEmbedderError, match="no (colbert|muvera)|of the type"):
                client.embed(TEXTS, **options)


def test_response_without_the_required_vector_space_is_an_error(honest) -> None:
    with answering(honest["embed"].content, content_type=MEDIA_TYPE) as client:
        assert client.embed(TEXTS).vector_space == {}
        with pytest.raises(SmartEmbedderError, match="Vector-Space is missing"):
            client.embed(TEXTS, if_vector_space=["dense-1"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: {"index": 1}}, "each once"),
        ({0: {"index": 3}}, "each once"),
        ({0: {"score": 1e39}}, "not finite"),
        ({0: {"score": None}}, "not finite"),
        ({0: {"score": 10**400}}, "OverflowError"),
        ({0: {"parts": {"dense": 1.0}}, 1: {"parts": None}, 2: {"parts": None}}, "KeyError"),
    ],
)
def test_a_ranking_of_other_passages_is_an_error(honest, changes, message: str) -> None:
    answer = honest["rerank"].json()
    answer["results"].sort(key=lambda result: result["index"])
    for i, result in enumerate(answer["results"]):
        result |= {"score": float(-i), "parts": None, **changes.get(i, {})}
    with (
        answering(json.dumps(answer).encode()) as client,
        pytest.raises(SmartEmbedderError, match=message),
    ):
        ask(client, "rerank")
