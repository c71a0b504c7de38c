"""The errors that the user of each client sees, and applications that are built on the clients."""

from dataclasses import dataclass, replace

from app.schemas import OPENAI_TEXTS
from tests.clients.expected import MOST_TEXTS


@dataclass(frozen=True, slots=True)
class Client:
    """The errors that the user of a client sees; None where there is none.

    One that names no model cannot name a wrong one, one that sends `batch` texts a request sends no
    list that is too long, and one may try again until it succeeds. `impatient` makes it give up.
    Of what it is `silent` about, it does not pass the service's sentence on.
    `most` texts are taken in one request, where that is not the limit of the native endpoint.
    """

    wrong_model: str | None
    wrong_token: str
    oversized: str | None
    full_queue: str
    too_many: str | None
    batch: int | None = None
    impatient: tuple[str, str] | None = None
    retries: bool = True
    silent: tuple[str, ...] = ()
    most: int = MOST_TEXTS


def of_openai(impatient: tuple[str, str] | None, batch: int | None = None) -> Client:
    return Client(
        "NotFoundError",
        "AuthenticationError",
        "BadRequestError" if batch is None else None,
        "InternalServerError",
        "RateLimitError",
        batch,
        impatient,
        most=OPENAI_TEXTS,
    )


EVERYTHING = ("wrong_model", "wrong_token", "oversized", "full_queue", "too_many")
IN_PYTHON = ('api_key="my-token"', 'api_key="my-token", max_retries=0')
IN_JAVASCRIPT = ('apiKey: "my-token"', 'apiKey: "my-token", maxRetries: 0')
IN_HAYSTACK = 'Secret.from_token("my-token")'
OF_COHERE = Client(
    "NotFoundError", "UnauthorizedError", "BadRequestError", "ServiceUnavailableError", None
)
OF_VOYAGE = Client(
    "APIError",
    "AuthenticationError",
    "InvalidRequestError",
    "ServiceUnavailableError",
    "RateLimitError",
    retries=False,
    silent=("full_queue",),
    most=OPENAI_TEXTS,
)
OF_AI_SDK = Client(
    "APICallError",
    "APICallError",
    None,
    "RetryError",
    None,
    batch=OPENAI_TEXTS,
    most=OPENAI_TEXTS,
)
OF_OLLAMA = Client(*["ResponseError"] * 5, retries=False, most=OPENAI_TEXTS)
OF_THE_HUB = Client(None, *["HfHubHTTPError"] * 4, retries=False)
# It tries again for a quarter of an hour, and names the status alone where it gives up on 429.
OF_SIE = Client(
    "RequestError",
    "RequestError",
    "RequestError",
    "ServerError",
    "RateLimitError",
    impatient=(
        'api_key="my-token")',
        """api_key="my-token")
from functools import partial
client.encode = partial(client.encode, provision_timeout_s=1)
client.score = partial(client.score, provision_timeout_s=1)""",
    ),
    silent=("too_many",),
)
CLIENTS = {
    "openai, Python": of_openai(IN_PYTHON),
    "openai, Node": of_openai(IN_JAVASCRIPT),
    "LangChain.js": of_openai(IN_JAVASCRIPT, batch=512),
    "Vercel AI SDK": OF_AI_SDK,
    "langchain-openai": of_openai(IN_PYTHON, batch=1000),
    "openai, Azure": of_openai(IN_PYTHON),
    "langchain-openai, Azure": of_openai(IN_PYTHON, batch=1000),
    "Vercel AI SDK, Azure": OF_AI_SDK,
    "LlamaIndex, OpenAI-like": of_openai(IN_PYTHON, batch=100),
    "Qdrant": of_openai(IN_PYTHON),
    "cohere": OF_COHERE,
    "cohere, embed": OF_COHERE,
    "voyageai": OF_VOYAGE,
    "voyageai, rerank": replace(OF_VOYAGE, most=MOST_TEXTS),
    "langchain-cohere": OF_COHERE,
    "LlamaIndex, Cohere": replace(OF_COHERE, impatient=IN_PYTHON),
    "huggingface_hub": OF_THE_HUB,
    "langchain-huggingface": OF_THE_HUB,
    "LlamaIndex, TEI": Client(
        None,
        "ValidationError",
        None,
        "ValidationError",
        "ValidationError",
        batch=10,
        retries=False,
        silent=EVERYTHING,
    ),
    "LlamaIndex, TEI rerank": Client(
        None, *["AssertionError"] * 4, retries=False, silent=EVERYTHING
    ),
    "langchain-cohere, embeddings": replace(
        OF_COHERE,
        oversized=None,
        batch=96,
        impatient=('api_key="my-token"', 'api_key="my-token", max_retries=1'),
    ),
    "LiteLLM": replace(of_openai(None), full_queue="ServiceUnavailableError", too_many=None),
    "LiteLLM, rerank": replace(
        of_openai(None), full_queue="ServiceUnavailableError", retries=False
    ),
    "Haystack": of_openai((IN_HAYSTACK, f"{IN_HAYSTACK}, max_retries=0"), batch=32),
    "Haystack, TEI": replace(OF_THE_HUB, oversized=None, batch=32),
    "Haystack, TEI rerank": Client(
        None, *["RuntimeError"] * 4, impatient=(IN_HAYSTACK, f"{IN_HAYSTACK}, max_retries=1")
    ),
    "Haystack, vLLM rerank": Client(*["RuntimeError"] * 5, retries=False),
    "Haystack, Jina rerank": Client(*["RuntimeError"] * 5, retries=False),
    "Ollama": OF_OLLAMA,
    "Ollama, Node": OF_OLLAMA,
    "langchain-ollama": OF_OLLAMA,
    "LangChain.js, Ollama": replace(
        OF_OLLAMA, retries=True, impatient=("  headers,", "  headers,\n  maxRetries: 0,")
    ),
    "LlamaIndex, Ollama": replace(OF_OLLAMA, oversized=None, batch=10),
    "Haystack, Ollama": replace(OF_OLLAMA, oversized=None, batch=32),
    # It reads no `error` that is a string, as Ollama's are.
    "Vercel AI SDK, Ollama": replace(OF_AI_SDK, silent=EVERYTHING),
    "Milvus": of_openai(IN_PYTHON),
    # It reads no `error.message`, which OpenAI's errors have at this path.
    "Milvus, TEI": Client(
        None, *["KeyError"] * 4, retries=False, most=OPENAI_TEXTS, silent=EVERYTHING
    ),
    "Milvus, Cohere": replace(OF_COHERE, oversized=None, batch=96),
    "SIE": OF_SIE,
    "SIE, score": OF_SIE,
    "SIE, langchain": OF_SIE,
    "SIE, Qdrant": OF_SIE,
}
IN_LANGCHAIN_JS = 'model: "BAAI/bge-m3",'
# Applications and providers that are built on a client: its example, and replacements in the code.
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
    "LiteLLM, Azure": ("LiteLLM", ("openai/", "azure/"), ("/v1", "")),
    "LiteLLM, Ollama": ("LiteLLM", ("openai/", "ollama/"), ("/v1", "")),
    "LiteLLM, Infinity": ("LiteLLM", ("openai/", "infinity/")),
    # It sends no Content-Type.
    "LiteLLM, Voyage": ("LiteLLM", ("openai/", "voyage/")),
    "LiteLLM, Voyage rerank": ("LiteLLM, rerank", ("hosted_vllm/", "voyage/")),
    # Infinity returns documents as strings, Cohere as objects.
    "LiteLLM, Infinity rerank": (
        "LiteLLM, rerank",
        ("hosted_vllm/", "infinity/"),
        ("query=query", "query=query, return_documents=False"),
    ),
    "LiteLLM, Cohere rerank": ("LiteLLM, rerank", ("hosted_vllm/", "cohere/")),
}
