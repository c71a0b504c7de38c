"""OpenAI's clients in more depth: encodings, kinds of input, and retries."""

import pytest

from app.schemas import OPENAI_TEXTS
from tests.clients.client_process import ENVIRONMENT
from tests.clients.conftest import full_queue, rejected, use_up_rate_limit
from tests.clients.expected import decode_vector, embed_natively

pytestmark = pytest.mark.skipif(
    not ENVIRONMENT.is_dir(), reason="scripts/check_clients.sh makes the clients' environment"
)
TEXTS = ["hybrid search", "What is bread?"]
INPUT = {"openai, Python": "input=texts", "openai, Node": "input: texts"}
SEPARATOR = {"openai, Python": "=", "openai, Node": ": "}
# An invalid request of the same client, before the valid one.
REFUSED = {
    "openai, Python": (
        "vectors = [",
        """import openai
try:
    client.embeddings.create(model="BAAI/bge-m3", input={texts})
    raise ValueError("it was answered")
except openai.BadRequestError:
    pass
vectors = [""",
    ),
    "openai, Node": (
        "const answer =",
        """await client.embeddings.create({{ model: "BAAI/bge-m3", input: {texts} }}).then(
    () => {{ throw new Error("it was answered"); }},
    (error) => {{ if (!(error instanceof OpenAI.BadRequestError)) throw error; }},
);
const answer =""",
    ),
}


@pytest.fixture(scope="module", params=INPUT)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def as_bytes(found: dict) -> bytes:
    return b"".join(decode_vector(vector).tobytes() for vector in found["vectors"])


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
@pytest.mark.parametrize("count", [1, 2, OPENAI_TEXTS])
def test_openai_encodings_give_the_native_vectors(
    encoding: str | None, count: int, name, process, clients_server, native
) -> None:
    texts = [f"search {i} " * (i % 7 + 1) for i in range(count)]
    option = f'{INPUT[name]}, encoding_format{SEPARATOR[name]}"{encoding}"'
    replaced = [] if encoding is None else [(INPUT[name], option)]
    found = process.run(clients_server.url, texts, *replaced)
    # The client decodes base64 only if it was not requested by name.
    assert all(isinstance(vector, str) == (encoding == "base64") for vector in found["vectors"])
    assert as_bytes(found) == embed_natively(native, texts).tobytes()


def test_openai_single_string_is_embedded(name, process, clients_server, native) -> None:
    alone = (INPUT[name], f"{INPUT[name]}[0]")
    found = process.run(clients_server.url, TEXTS, alone)
    assert as_bytes(found) == embed_natively(native, TEXTS[:1]).tobytes()


@pytest.mark.parametrize("ids", [[101, 2023, 102], [[101, 102], [103]]], ids=["one", "several"])
def test_openai_token_ids_are_refused_with_advice(ids: list, name, process, clients_server) -> None:
    found = process.run(clients_server.url, ids)
    assert found["error"] == "BadRequestError"
    assert "token ids" in found["message"]
    assert "check_embedding_ctx_length=False" in found["message"]


@pytest.mark.parametrize("texts", ["[]", "[1, 2]", "['a', 5]"])
def test_openai_client_works_after_an_error(
    texts: str, name, process, clients_server, native
) -> None:
    old, new = REFUSED[name]
    found = process.run(clients_server.url, TEXTS, (old, new.format(texts=texts)))
    assert as_bytes(found) == embed_natively(native, TEXTS).tobytes()


def test_openai_client_retries_503_twice(name, process, clients_server, hold, native) -> None:
    before = rejected(clients_server, "backpressure")
    with full_queue(clients_server, hold):
        found = process.run(clients_server.url, TEXTS)
    assert found["error"] == "InternalServerError"
    assert "MAX_QUEUE_SIZE" in found["message"]
    assert rejected(clients_server, "backpressure") == before + 3
    found = process.run(clients_server.url, TEXTS)
    assert as_bytes(found) == embed_natively(native, TEXTS).tobytes()


def test_openai_client_waits_for_retry_after_429(name, process, limited_server, native) -> None:
    before = rejected(limited_server, "rate_limit")
    with use_up_rate_limit(limited_server) as url:
        found = process.run(url, TEXTS)
    assert as_bytes(found) == embed_natively(native, TEXTS).tobytes()
    # Two requests: the one that used up the limit, and the client's first.
    assert rejected(limited_server, "rate_limit") == before + 2
