"""Applications that are built on one of the clients, with the options that they give it."""

import os

import pytest

from tests.clients.client_process import ENVIRONMENT, EXAMPLES, client_process
from tests.clients.conftest import TEXTS
from tests.clients.expected import assert_right
from tests.clients.recorder import record, recorder

pytestmark = pytest.mark.skipif(
    not ENVIRONMENT.is_dir(), reason="scripts/check_clients.sh makes the clients' environment"
)
IN_LANGCHAIN_JS = 'model: "BAAI/bge-m3",'
# The example, and what is replaced in it.
APPLICATIONS = {
    "n8n": (
        "LangChain.js",
        (
            IN_LANGCHAIN_JS,
            f"{IN_LANGCHAIN_JS} batchSize: 512, stripNewLines: true, encodingFormat: 'float',",
        ),
    ),
    "AnythingLLM": ("openai, Node", ("import OpenAI", "import { OpenAI as OpenAI }")),
    "RAGFlow": (
        "openai, Python",
        ("input=texts", 'input=texts, encoding_format="float", extra_body={"drop_params": True}'),
    ),
    "LiteLLM, vLLM": ("LiteLLM", ("openai/", "hosted_vllm/")),
    "LiteLLM, Infinity": ("LiteLLM", ("openai/", "infinity/")),
    # Infinity's documents are strings, and Cohere's are objects.
    "LiteLLM, Infinity rerank": (
        "LiteLLM, rerank",
        ("hosted_vllm/", "infinity/"),
        ("query=query", "query=query, return_documents=False"),
    ),
    "LiteLLM, Cohere rerank": ("LiteLLM, rerank", ("hosted_vllm/", "cohere/")),
}


@pytest.mark.parametrize("name", APPLICATIONS)
def test_its_numbers_are_the_native_ones(name: str, clients_server, native) -> None:
    example, *replaced = APPLICATIONS[name]
    with client_process(EXAMPLES[example]) as process, recorder(clients_server.url) as proxy:
        assert_right(process.run(proxy.url, TEXTS, *replaced), native, TEXTS)
        if os.environ.get("RECORD_CLIENTS"):
            record(name, proxy.requests[0])
