"""The clients that people have, each in its own words: the examples of docs/clients.md.

They need an environment of their own: scripts/check_clients.sh makes it and runs these tests. With
RECORD_CLIENTS set, what the clients send is stored for test_recorded.py.
"""

import json
import os
import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.clients.client_process import (
    ENVIRONMENT,
    EXAMPLES,
    HERE,
    PAGE,
    REPOSITORY,
    client_process,
)
from tests.clients.conftest import MOST_TEXTS, full_queue, rejected, use_up_the_rate
from tests.clients.expected import assert_same_scores, scores_of, vector_of, vectors_of
from tests.clients.recorder import recorder

TEXTS = ["hybrid search", "What is bread?", "рiver жизнь 检索", "vector " * 30]
PACKAGES_OF_NODE = {"openai, Node": "openai", "LangChain.js": "@langchain/openai"}
pytestmark = pytest.mark.skipif(
    not ENVIRONMENT.is_dir(), reason="scripts/check_clients.sh makes the clients' environment"
)


@dataclass(frozen=True, slots=True)
class Client:
    """The errors that the user of a client sees; None where there is none.

    One that names no model cannot name a wrong one, one that sends `batch` texts a request sends no
    list that is too long, and one may try again until it succeeds. `impatient` makes it give up.
    """

    wrong_model: str | None
    wrong_token: str
    oversized: str | None
    full_queue: str
    too_many: str | None
    batch: int = MOST_TEXTS
    impatient: tuple[str, str] | None = None
    retries: bool = True
    tells_why: bool = True


def of_openai(impatient: tuple[str, str] | None, batch: int = MOST_TEXTS) -> Client:
    return Client(
        "NotFoundError",
        "AuthenticationError",
        "BadRequestError" if batch == MOST_TEXTS else None,
        "InternalServerError",
        "RateLimitError",
        batch,
        impatient,
    )


IN_PYTHON = ('api_key="my-token"', 'api_key="my-token", max_retries=0')
IN_JAVASCRIPT = ('apiKey: "my-token"', 'apiKey: "my-token", maxRetries: 0')
OF_COHERE = Client(
    "NotFoundError",
    "UnauthorizedError",
    "BadRequestError",
    "ServiceUnavailableError",
    None,
)
OF_THE_HUB = Client(None, *["HfHubHTTPError"] * 4, retries=False)
CLIENTS = {
    "openai, Python": of_openai(IN_PYTHON),
    "openai, Node": of_openai(IN_JAVASCRIPT),
    "LangChain.js": of_openai(IN_JAVASCRIPT),
    "langchain-openai": of_openai(IN_PYTHON),
    "LlamaIndex, OpenAI-like": of_openai(IN_PYTHON, batch=100),
    "Qdrant": of_openai(IN_PYTHON),
    "cohere": OF_COHERE,
    "cohere, embed": OF_COHERE,
    "langchain-cohere": OF_COHERE,
    "LlamaIndex, Cohere": replace(OF_COHERE, impatient=IN_PYTHON),
    "huggingface_hub": OF_THE_HUB,
    "huggingface_hub, similarity": OF_THE_HUB,
    "langchain-huggingface": OF_THE_HUB,
    "LlamaIndex, TEI": Client(
        None,
        "ValidationError",
        None,
        "ValidationError",
        "ValidationError",
        batch=10,
        retries=False,
        tells_why=False,
    ),
    "LlamaIndex, TEI rerank": Client(None, *["AssertionError"] * 4, retries=False, tells_why=False),
}
# What the client is made to send: texts, and what is replaced in the example.
REQUESTS = {
    "wrong_model": (TEXTS, ("BAAI/", "unknown/")),
    "wrong_token": (TEXTS, ("my-token", "another-token")),
    "oversized": ([f"search {i}" for i in range(MOST_TEXTS + 1)],),
}
WORDS = {
    "wrong_model": "not served here",
    "wrong_token": "token",
    "oversized": f"at most {MOST_TEXTS}",
    "full_queue": "queue is full",
    "too_many": "RATE_LIMIT_BURST_SIZE",
}


@pytest.fixture(scope="module", params=CLIENTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def process(name: str):
    with client_process(EXAMPLES[name]) as running:
        yield running


def test_every_example_is_tested() -> None:
    assert list(EXAMPLES) == list(CLIENTS)


def test_the_versions_of_the_table_are_those_that_are_installed() -> None:
    pins = (REPOSITORY / "requirements-clients.txt").read_text()
    node = json.loads((HERE / "package.json").read_text())["dependencies"]
    table = re.findall(r"^\| \[([^]]+)\]\([^)]*\) \| (\S+) \|", PAGE, re.MULTILINE)
    assert [name for name, _ in table] == list(EXAMPLES)
    for name, version in table:
        if name in PACKAGES_OF_NODE:
            assert node[PACKAGES_OF_NODE[name]] == version
        else:
            assert f"=={version}\n" in pins


def test_its_numbers_are_the_native_ones(name, process, clients_server, native) -> None:
    with recorder(clients_server.url) as proxy:
        assert_right(process.run(proxy.url, TEXTS), native)
        if os.environ.get("RECORD_CLIENTS"):
            record(name, proxy.requests[0])
    assert_right(process.run(clients_server.url, TEXTS), native)


def test_its_numbers_are_the_native_ones_for_hundreds_of_texts(
    name, process, clients_server, native
) -> None:
    # LlamaIndex's examples ask for the best 100.
    count = 100 if "postprocess_nodes" in EXAMPLES[name].code else MOST_TEXTS - 1
    texts = [f"search {i} " * (i % 7 + 1) for i in range(count)]
    found = process.run(clients_server.url, texts)
    assert_right(found, native, texts, CLIENTS[name].batch)


@pytest.mark.parametrize("situation", REQUESTS)
def test_its_user_is_told_what_is_wrong(
    situation: str, name, process, clients_server, native
) -> None:
    texts, *replaced = REQUESTS[situation]
    if any(old not in EXAMPLES[name].code for old, _ in replaced):
        pytest.skip("it names no model")
    found = process.run(clients_server.url, texts, *replaced)
    assert_told(found, name, situation, native, texts)
    assert_right(process.run(clients_server.url, TEXTS), native)


def test_its_user_is_told_of_a_full_queue(name, process, clients_server, hold, native) -> None:
    with full_queue(clients_server, hold):
        found = process.run(clients_server.url, TEXTS, *impatience(name))
    assert_told(found, name, "full_queue", native)
    assert_right(process.run(clients_server.url, TEXTS), native)


def test_its_user_is_told_of_too_many_requests(
    name, process, clients_server, limited_server, native
) -> None:
    use_up_the_rate(limited_server)
    found = process.run(limited_server.url, TEXTS, *impatience(name))
    assert_told(found, name, "too_many", native)
    assert_right(process.run(clients_server.url, TEXTS), native)


def test_one_that_tries_again_gets_a_place_once_there_is_one(
    name, process, clients_server, hold, native
) -> None:
    if not CLIENTS[name].retries:
        pytest.skip("it does not try again")
    before = rejected(clients_server, "backpressure")
    with full_queue(clients_server, hold):
        process.start(clients_server.url, TEXTS)
        clients_server.wait_for_more(lambda: rejected(clients_server, "backpressure"), before)
    assert_right(process.result(), native)


def test_one_that_tries_again_waits_for_the_rate_limit(
    name, process, limited_server, native
) -> None:
    if not CLIENTS[name].retries:
        pytest.skip("it does not try again")
    use_up_the_rate(limited_server)
    before = rejected(limited_server, "rate_limit")
    assert_right(process.run(limited_server.url, TEXTS), native)
    assert rejected(limited_server, "rate_limit") == before + 1


def impatience(name: str) -> list[tuple[str, str]]:
    client = CLIENTS[name]
    return [] if client.impatient is None else [client.impatient]


def assert_told(found: dict, name: str, situation: str, native, texts: list[str] = TEXTS) -> None:
    client = CLIENTS[name]
    error = getattr(client, situation)
    if error is None:
        assert_right(found, native, texts, client.batch)
    else:
        assert found.get("error") == error, found
        assert WORDS[situation] in found["message"] or not client.tells_why, found


def assert_right(found: dict, native, texts: list[str] = TEXTS, batch: int = MOST_TEXTS) -> None:
    if "vectors" in found:
        batches = [texts[i : i + batch] for i in range(0, len(texts), batch)]
        expected = np.concatenate([vectors_of(native, each) for each in batches])
        vectors = np.stack([vector_of(each) for each in found["vectors"]])
        assert vectors.tobytes() == expected.tobytes()
    elif "similarities" in found:
        unit = vectors_of(native, texts)
        np.testing.assert_allclose(found["similarities"], unit @ unit[0], rtol=0, atol=1e-6)
    else:
        assert "scores" in found, found
        assert_same_scores(found["scores"], scores_of(native, texts[0], texts))


def record(name: str, request: dict) -> None:
    path = HERE / "recorded" / f"{re.sub('[^a-z]+', '-', name.lower())}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(request, ensure_ascii=False, indent=2) + "\n")
