"""The clients that people have, each in its own words: the examples of docs/clients.md.

They need an environment of their own: scripts/check_clients.sh makes it and runs these tests. With
RECORD_CLIENTS set, what the clients send is stored for test_recorded.py.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.clients.conftest import MOST_TEXTS
from tests.clients.expected import assert_same_scores, scores_of, vectors_of
from tests.clients.recorder import recorder

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
ENVIRONMENT = REPOSITORY / ".venv-clients"
PAGE = (REPOSITORY / "docs" / "clients.md").read_text()
EXAMPLES = {
    name: (language, code)
    for name, language, code in re.findall(
        r"^## ([^\n]+)\n(?:(?!^## ).)*?```(python|js)\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL
    )
}
TEXTS = ["hybrid search", "What is bread?", "рiver жизнь 检索", "vector " * 30]
REFUSED = {
    "openai, Python": ("NotFoundError", "AuthenticationError", "BadRequestError"),
    "openai, Node": ("NotFoundError", "AuthenticationError", "BadRequestError"),
    "LangChain.js": ("NotFoundError", "AuthenticationError", "BadRequestError"),
    "langchain-openai": ("NotFoundError", "AuthenticationError", "BadRequestError"),
    "LlamaIndex, OpenAI-like": ("NotFoundError", "AuthenticationError", "BadRequestError"),
    "Qdrant": ("NotFoundError", "AuthenticationError", "BadRequestError"),
    "cohere": ("NotFoundError", "UnauthorizedError", "BadRequestError"),
    "cohere, embed": ("NotFoundError", "UnauthorizedError", "BadRequestError"),
    "langchain-cohere": ("NotFoundError", "UnauthorizedError", "BadRequestError"),
    "LlamaIndex, Cohere": ("NotFoundError", "UnauthorizedError", "BadRequestError"),
    "huggingface_hub": (None, "HfHubHTTPError", "HfHubHTTPError"),
    "huggingface_hub, similarity": (None, "HfHubHTTPError", "HfHubHTTPError"),
    "langchain-huggingface": (None, "HfHubHTTPError", "HfHubHTTPError"),
    "LlamaIndex, TEI": (None, "ValidationError", "ValidationError"),
    "LlamaIndex, TEI rerank": (None, "AssertionError", "AssertionError"),
}
PACKAGES_OF_NODE = {"openai, Node": "openai", "LangChain.js": "@langchain/openai"}
# They send long lists in several requests.
SPLITS = {"LlamaIndex, OpenAI-like", "LlamaIndex, TEI"}
# They raise an error of their own that does not tell what the answer said.
SILENT = {"LlamaIndex, TEI rerank"}
WRONG_MODEL = {"BAAI/": "unknown/"}
WRONG_TOKEN = {"my-token": "another-token"}

pytestmark = pytest.mark.skipif(
    not ENVIRONMENT.is_dir(), reason="scripts/check_clients.sh makes the clients' environment"
)


def run_example(name: str, url: str, runs: list[dict]) -> list[dict]:
    language, code = EXAMPLES[name]
    code = code.replace("http://127.0.0.1:8000", url)
    if language == "python":
        command = [str(ENVIRONMENT / "bin" / "python"), str(HERE / "run_client.py")]
    else:
        command = ["node", str(HERE / "run_client.mjs"), str(ENVIRONMENT / "node")]
    # Offline, the hub's library asks no server at all.
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    done = subprocess.run(
        command,
        env=environment,
        input=json.dumps({"code": code, "runs": runs}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict] = json.loads(done.stdout)
    return found


def test_every_example_is_tested() -> None:
    assert set(EXAMPLES) == set(REFUSED)


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


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_client_works_and_says_what_is_wrong(name: str, clients_server, native) -> None:
    plain = {"texts": TEXTS, "replace": {}}
    runs = [
        plain,
        {"texts": TEXTS, "replace": WRONG_MODEL},
        {"texts": TEXTS, "replace": WRONG_TOKEN},
        {"texts": [f"search {i}" for i in range(MOST_TEXTS + 1)], "replace": {}},
        plain,
    ]
    with recorder(clients_server.url) as proxy:
        first, *refused, last = run_example(name, proxy.url, runs)
        assert_right(first, native)
        assert_right(last, native)
        for expected, found, words in zip(
            REFUSED[name], refused, ("not served here", "token", "at most 40"), strict=True
        ):
            if words == "at most 40" and name in SPLITS:
                assert len(found["vectors"]) == MOST_TEXTS + 1
            elif expected is None:
                assert_right(found, native)
            else:
                assert found["error"] == expected, found
                assert words in found["message"] or name in SILENT, found
        if os.environ.get("RECORD_CLIENTS"):
            record(name, proxy.requests[0])


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_client_waits_for_a_full_queue_or_says_so(name: str, clients_server, native) -> None:
    with recorder(clients_server.url) as proxy:
        proxy.refusals = 1
        first, last = run_example(name, proxy.url, [{"texts": TEXTS, "replace": {}}] * 2)
        if "error" in first:
            assert "queue" in first["message"] or name in SILENT, first
        else:
            assert_right(first, native)
        assert_right(last, native)


def assert_right(found: dict, native) -> None:
    if "vectors" in found:
        expected = vectors_of(native, TEXTS)
        assert np.float32(found["vectors"]).tobytes() == expected.tobytes()
    elif "similarities" in found:
        unit = vectors_of(native, TEXTS)
        np.testing.assert_allclose(found["similarities"], unit @ unit[0], rtol=0, atol=1e-6)
    else:
        assert "scores" in found, found
        assert_same_scores(found["scores"], scores_of(native, TEXTS[0], TEXTS))


def record(name: str, request: dict) -> None:
    path = HERE / "recorded" / f"{re.sub('[^a-z]+', '-', name.lower())}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(request, ensure_ascii=False, indent=2) + "\n")
