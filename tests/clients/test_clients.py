"""The clients that people have, each in its own words: the examples of docs/other-clients.md.

They need an environment of their own: scripts/check_clients.sh makes it and runs these tests. With
RECORD_CLIENTS set, what the clients send is stored for test_recorded.py.
"""

import json
import os

import pytest

from tests.clients.client_process import ENVIRONMENT, EXAMPLES, TIKTOKEN_FILES
from tests.clients.clients import APPLICATIONS, CLIENTS
from tests.clients.conftest import TEXTS, full_queue, rejected, use_up_rate_limit
from tests.clients.expected import MOST_TEXTS, check_numbers
from tests.clients.recorder import record, recorder

pytestmark = pytest.mark.skipif(
    not ENVIRONMENT.is_dir(), reason="scripts/check_clients.sh makes the clients' environment"
)
RETRYING = [name for name, client in CLIENTS.items() if client.retries]
# Replacements in the example.
SITUATIONS = {
    "wrong_model": [("BAAI/", "unknown/")],
    "wrong_token": [("my-token", "another-token")],
    "oversized": [],
}
WORDS = {
    "wrong_model": "not served here",
    "wrong_token": "token is unknown",
    "oversized": "are allowed (MAX_",
    "full_queue": "queue is full",
    "too_many": "RATE_LIMIT_BURST_SIZE",
}


@pytest.fixture(scope="module", params=CLIENTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_client_gets_the_native_numbers(name, process, clients_server, native) -> None:
    with recorder(clients_server.url) as proxy:
        check_numbers(process.run(proxy.url, TEXTS), native, TEXTS)
        if os.environ.get("RECORD_CLIENTS"):
            record(name, proxy.requests[0])
    check_numbers(process.run(clients_server.url, TEXTS), native, TEXTS)


@pytest.mark.parametrize(
    ("name", "application"),
    [(name, application) for application, (name, *_) in APPLICATIONS.items()],
    indirect=["name"],
    scope="module",
)
def test_application_gets_the_native_numbers(
    application: str, name, process, clients_server, native
) -> None:
    _, *replaced = APPLICATIONS[application]
    with recorder(clients_server.url) as proxy:
        check_numbers(process.run(proxy.url, TEXTS, *replaced), native, TEXTS)
        if os.environ.get("RECORD_CLIENTS"):
            record(application, proxy.requests[0])


def test_client_gets_the_native_numbers_of_hundreds_of_texts(
    name, process, clients_server, native
) -> None:
    # Some examples request the best 100.
    count = 100 if "=100" in EXAMPLES[name].code else MOST_TEXTS - 1
    texts = [f"search {i} " * (i % 7 + 1) for i in range(count)]
    found = process.run(clients_server.url, texts)
    check_numbers(found, native, texts, CLIENTS[name].batch)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_client_error_gives_the_reason(
    situation: str, name, process, clients_server, native
) -> None:
    replaced, most = SITUATIONS[situation], CLIENTS[name].most
    texts = [f"search {i}" for i in range(most + 1)] if situation == "oversized" else TEXTS
    if any(old not in EXAMPLES[name].code for old, _ in replaced):
        pytest.skip("it names no model")
    found = process.run(clients_server.url, texts, *replaced)
    check_error(found, name, situation, native, texts)
    check_numbers(process.run(clients_server.url, TEXTS), native, TEXTS)


def test_client_error_503_of_a_full_queue(name, process, clients_server, hold, native) -> None:
    with full_queue(clients_server, hold):
        found = process.run(clients_server.url, TEXTS, *impatience(name))
    check_error(found, name, "full_queue", native)
    check_numbers(process.run(clients_server.url, TEXTS), native, TEXTS)


def test_client_error_429_of_the_rate_limit(
    name, process, clients_server, limited_server, native
) -> None:
    with use_up_rate_limit(limited_server) as url:
        found = process.run(url, TEXTS, *impatience(name))
    check_error(found, name, "too_many", native)
    check_numbers(process.run(clients_server.url, TEXTS), native, TEXTS)


@pytest.mark.parametrize("name", RETRYING, indirect=True, scope="module")
def test_client_retries_503_until_the_queue_has_room(
    name, process, clients_server, hold, native
) -> None:
    before = rejected(clients_server, "backpressure")
    with full_queue(clients_server, hold):
        process.start(clients_server.url, TEXTS)
        clients_server.wait_for_more(lambda: rejected(clients_server, "backpressure"), before)
    check_numbers(process.result(), native, TEXTS)


@pytest.mark.parametrize("name", RETRYING, indirect=True, scope="module")
def test_client_retries_429_until_the_rate_limit_allows_it(
    name, process, limited_server, native
) -> None:
    before = rejected(limited_server, "rate_limit")
    with use_up_rate_limit(limited_server) as url:
        check_numbers(process.run(url, TEXTS), native, TEXTS)
    # Two requests: the one that used up the limit, and the client's first.
    assert rejected(limited_server, "rate_limit") >= before + 2


# What LangChain's class sends unless it is told otherwise.
WITH_TOKEN_IDS = ("    check_embedding_ctx_length=False,\n", "")
IDS_NAMES = ["langchain-openai", "langchain-openai, Azure"]


@pytest.fixture(scope="session")
def token_ids_server(settings: dict[str, str], serve):
    """A server that decodes token ids with the table of a package."""
    table = {"TOKEN_IDS": "cl100k", "TIKTOKEN_CACHE_DIR": str(TIKTOKEN_FILES)}
    with serve(**settings, **table) as running:
        yield running


@pytest.mark.parametrize("name", IDS_NAMES, indirect=True, scope="module")
def test_token_ids_are_read_as_the_text(name, process, token_ids_server, native) -> None:
    texts = [*TEXTS, "a 😀👩‍👩‍👧 b", "مرحبا بالعالم", "<|endoftext|> is a text", "again " * 3000]
    with recorder(token_ids_server.url) as proxy:
        check_numbers(process.run(proxy.url, texts, WITH_TOKEN_IDS), native, texts)
        sent = json.loads(proxy.requests[0]["body"])["input"]
    assert all(isinstance(token_id, int) for ids in sent for token_id in ids)


@pytest.mark.parametrize("name", IDS_NAMES, indirect=True, scope="module")
def test_token_ids_are_refused_without_a_table(name, process, clients_server) -> None:
    found = process.run(clients_server.url, TEXTS, WITH_TOKEN_IDS)
    assert found["error"] == "BadRequestError"
    assert "check_embedding_ctx_length=False" in found["message"]


def impatience(name: str) -> list[tuple[str, str]]:
    client = CLIENTS[name]
    return [] if client.impatient is None else [client.impatient]


def check_error(found: dict, name: str, situation: str, native, texts: list[str] = TEXTS) -> None:
    client = CLIENTS[name]
    error = getattr(client, situation)
    if error is None:
        check_numbers(found, native, texts, client.batch)
    else:
        assert found.get("error") == error, found
        assert WORDS[situation] in found["message"] or situation in client.silent, found
