"""Every setting: its name, what it may be, its default and its meaning.

`smart-embedder --help`, .env.example and the tables of docs/configuration.md are generated from
this module: run `python -m scripts.settings_docs` after a change.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, SecretStr, model_validator
from pydantic.fields import FieldInfo

from smart_embedder.errors import StartupError
from smart_embedder.settings import types

# The groups that settings are shown in, each by its first setting.
SECTIONS = {
    "host": "Address",
    "embedding_model": "Models",
    "device": "Hardware",
    "bge_embed_max_length": "Lengths, in tokens",
    "max_batch_tokens": "Batching",
    "embedding_cache_bytes": "Cache",
    "max_queue_size": "Limits",
    "api_token": "Access",
    "rate_limit_burst_size": "Rate limit",
    "log_format": "Logs",
    "otlp_endpoint": "Traces",
}


class Settings(BaseModel):
    """The settings of a service or of an engine; None is a setting that is not set.

    Reads no sources: `sources.load_settings` reads flags, the environment and .env.
    Raises `ValueError` for a name that is no setting and for a value that is not allowed.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,  # There may be a password in an address.
        use_attribute_docstrings=True,
        validate_default=True,
    )

    host: str = "127.0.0.1"
    """the address to listen on; `0.0.0.0` in the container"""
    port: types.Port = 8000
    """the port; 0 takes a free one and logs it"""
    ui: bool = True
    """whether the page at `/ui` is served"""

    embedding_model: types.EmbeddingModel = "BAAI/bge-m3"
    """a hub id or folder of a text encoder; one of bge-m3's kind makes all three kinds of
    vectors"""
    dense_embedding_model: types.DenseModel | None = None
    """another model for dense vectors, such as `Qwen/Qwen3-Embedding-0.6B`; not set,
    `EMBEDDING_MODEL` makes every kind"""
    pooling: types.Pooling | None = None
    """how a dense vector is made of the states of tokens, instead of what the model's
    sentence-transformers configuration says; not for bge-m3's kind"""
    normalize: bool | None = None
    """whether dense vectors are scaled to unit length, instead of what the model's
    sentence-transformers configuration says; not for bge-m3's kind"""
    query_prompt: types.Prompt | None = None
    """what the model of dense vectors reads before a text with `"input_type": "query"`, instead of
    its configuration's prompt; not for ColBERT models"""
    document_prompt: types.Prompt | None = None
    """the same for `"input_type": "document"`"""
    reranker_model: types.RerankerModel = "BAAI/bge-reranker-v2-m3"
    """a hub id or folder of a cross-encoder or a model of Qwen3-Reranker's kind;
    `late-interaction`: `EMBEDDING_MODEL` scores the passages, and no second model is loaded; or
    `none`"""
    model_revision: str | None = None
    """a branch, tag or commit of `EMBEDDING_MODEL` on the hub; not set, the newest"""
    dense_model_revision: str | None = None
    """the same for `DENSE_EMBEDDING_MODEL`"""
    reranker_model_revision: str | None = None
    """the same for `RERANKER_MODEL`"""
    model_aliases: types.ModelAliases | None = None
    """further names by which clients may ask for a model, separated by commas:
    `text-embedding-3-small=BAAI/bge-m3,rerank-v3.5=BAAI/bge-reranker-v2-m3`. Every model also
    answers to its hub id and to the last part of it"""
    models: tuple[types.ModelEntry, ...] | None = None
    """a YAML or TOML file of further models, which requests name, such as `models.yaml`: see
    docs/models.md"""
    model_memory_threshold: types.Share = 0.9
    """the share of a device's memory above which models of `MODELS` are unloaded, the least
    recently used first; on a CPU the share of the control group's limit, or of the machine's
    memory"""
    hf_home: Path = Path("~/.cache/huggingface")
    """the folder of downloaded models, which are in `hub` below it"""
    hf_hub_offline: bool = False
    """whether only what is on the disk is used and the hub is never asked"""
    hf_token: SecretStr | None = None
    """the token that the hub is shown, for private models and for those whose terms must be
    accepted first; it is never logged"""
    hf_endpoint: types.HubAddress | None = None
    """the address of another hub; not set, huggingface.co"""
    https_proxy: SecretStr | None = None
    """the proxy through which the hub is asked, such as `http://proxy:3128`, and an
    `OTLP_ENDPOINT`, too, unless `NO_PROXY` has its host; it may hold a user and a password, and is
    never logged"""
    http_proxy: SecretStr | None = None
    """the same for addresses that begin with `http://`"""
    no_proxy: str | None = None
    """hosts, separated by commas, that are asked without a proxy"""

    device: types.DeviceNames = "auto"
    """`cuda`, `mps`, `cpu`, or several workers behind one queue: one on each GPU, `cuda:0,cuda:1`,
    or sharing the cores, `cpu:0,cpu:1`. `auto` is the first of cuda, mps and cpu that can be
    used"""
    dtype: types.Dtype = "auto"
    """the number format of the models. `auto` chooses by the device and the model. `int8`
    computes the products of any model in 8 bits on an x86 CPU with AVX2, or on Linux an ARM one
    with dot products; `float8` those of models of BERT's kind and Qwen3 on an NVIDIA GPU of Ada,
    Hopper or Blackwell, of which only Hopper has run it yet"""
    attention: types.Attention = "auto"
    """the attention kernel; one that cannot run here stops the start and says what is missing"""
    reproducible: bool = False
    """whether every text has a forward of its own where its numbers may depend on the batch by
    their last bits otherwise: on a GPU, and of models by transformers' modules; much slower"""
    pytorch_cuda_alloc_conf: str = "expandable_segments:True"
    """options of PyTorch's memory allocator on a GPU; PyTorch's own newer variable,
    `PYTORCH_ALLOC_CONF`, wins"""

    bge_embed_max_length: types.Tokens | None = None
    """the most tokens of a text that an embedding model other than Qwen3 reads; `MAX_INPUT_LENGTH`
    if not set"""
    max_input_length: types.Tokens = 8192
    """an older name for `BGE_EMBED_MAX_LENGTH`"""
    qwen_embed_max_length: types.Tokens = 32_768
    """the most tokens of a text that a Qwen3 embedding model reads"""
    bge_rerank_max_length: types.Tokens = 8192
    """the most tokens of a query and a passage together for a cross-encoder"""
    qwen_rerank_max_length: types.Tokens = 32_768
    """the same for Qwen3-Reranker, its template included; the launcher sets it by the memory where
    it is not set"""

    max_batch_tokens: types.AutoTokens = "auto"
    """the most tokens of one forward; `auto` measures at the start, and the log's `token_budget`
    line says what was chosen and why. Smaller means sooner answers under load"""
    max_requests_in_batch: types.Requests | None = None
    """the most requests that share one forward; not set, as many as fit"""
    max_batch_sequences: types.Sequences | None = None
    """the most texts or pairs in one forward; not set, as many as fit"""
    batch_wait_ms: types.Milliseconds = 0
    """milliseconds to wait for more requests before a batch is formed; 0 starts at once, and
    requests gather while the device is busy"""
    tokenizer_threads: types.AutoCount = "auto"
    """threads that tokenise; `auto` is one for each CPU, eight at most"""
    torch_compile: bool = False
    """has no effect: the service has kernels of its own. A warning in the log says so"""
    qwen_rerank_batch_size: types.Pairs = 16
    """the most pairs in one forward of Qwen3-Reranker: more take less time and more memory. The
    launcher sets it by the memory where it is not set"""

    embedding_cache_bytes: types.CacheBytes = 0
    """the most bytes of vectors that a process keeps in memory, so that a text that comes again is
    not computed again; the least recently used are dropped first. 0 keeps none"""

    max_queue_size: types.Requests = 200
    """embedding requests that may wait; more are refused after half a second (503)"""
    request_timeout: types.Seconds = 90
    """seconds for a whole request, from the first byte of its body to the rendered answer (504)"""
    gpu_process_timeout: types.Seconds | None = None
    """seconds for one embedding forward, not counting the wait before it (504); not set, 15 on a
    GPU and 30 on a CPU, or five times what the measurement at the start predicts for the batch,
    where that is more"""
    rerank_max_queue: types.Requests = 32
    """rerank requests accepted at once; more are refused after half a second (503)"""
    rerank_gpu_timeout: types.RerankSeconds = 60
    """seconds that one rerank request may spend in forwards (504); it must be below
    `REQUEST_TIMEOUT`"""
    shutdown_timeout: types.Seconds = 30
    """seconds to finish accepted work after SIGTERM"""
    shutdown_delay: types.Delay = 0
    """seconds after SIGTERM in which requests are still accepted while `/health` is 503, so that
    load balancers notice before anything is refused; it comes before `SHUTDOWN_TIMEOUT`"""
    max_sentences_per_request: types.Count = 1024
    """texts of one request (422); OpenAI's paths take at least 2,048"""
    max_rerank_passages: types.Count = 1024
    """passages of one request (422)"""
    max_body_bytes: types.Bytes = 16_777_216
    """bytes of one body (413, before it is read whole)"""

    api_token: SecretStr | None = None
    """the token that requests must show as `Authorization: Bearer <token>`; with neither this nor
    `API_TOKENS_FILE` set, none is asked for. Given as a flag, every process of the machine can read
    it"""
    api_tokens_file: Path | None = None
    """a file of named tokens, one `name:token` a line, read again when it changes; lines that begin
    with `#` do not count"""
    protect_metrics: bool = False
    """whether `/stats` and `/metrics` ask for a token too"""
    cors_origins: types.Origins | None = None
    """origins of web pages that may call the service from a browser, separated by commas, such as
    `https://app.example.com`; `*` is any. Not set, a request of a page from elsewhere is refused
    (403)"""

    rate_limit_burst_size: types.Count = 120
    """`POST` requests that one client may send at once"""
    rate_limit_requests_per_minute: types.Count = 3600
    """`POST` requests a minute that one client may send after its burst; more are refused (429,
    with `Retry-After`)"""
    trusted_proxies: types.Proxies | None = None
    """addresses and networks of proxies, separated by commas, that may name a client in
    `X-Forwarded-For`; not set, the header is ignored and a client is whoever holds the
    connection"""

    log_format: types.LogFormat = "console"
    """the form of the log; `json` is one object a line"""
    log_level: types.LogLevel = "info"
    """the least that is logged; a `GET` is at debug unless it was wrong (4xx)"""

    otlp_endpoint: types.Collector | None = None
    """an OpenTelemetry collector that speaks OTLP over HTTP, such as `http://localhost:4318`; spans
    go to `/v1/traces` there. Not set, none are made. An address with a user or a query is refused;
    of the rest only host and port are ever logged"""
    otel_service_name: str = "smart-embedder"
    """the service's name in its traces"""

    @model_validator(mode="after")
    def _agree(self) -> "Settings":
        if self.dtype == "float16" and self.device.startswith("cpu"):
            raise ValueError("DTYPE=float16 is for GPUs; on a CPU use bfloat16 or float32")
        if self.dtype == types.INT8 and self.device.startswith(("cuda", "mps")):
            raise ValueError(f"DTYPE=int8 is for CPUs; with DEVICE={self.device} use auto")
        if self.dtype == types.FLOAT8 and self.device.startswith(("cpu", "mps")):
            raise ValueError(f"DTYPE=float8 is for NVIDIA GPUs; with DEVICE={self.device} use auto")
        if self.rerank_gpu_timeout >= self.request_timeout:
            raise ValueError(
                f"RERANK_GPU_TIMEOUT={self.rerank_gpu_timeout:g} must be below "
                f"REQUEST_TIMEOUT={self.request_timeout:g}"
            )
        return self

    @property
    def devices(self) -> list[str]:
        """The devices by name, one worker each."""
        return list(dict.fromkeys(name.strip() for name in self.device.split(",")))

    @property
    def dense_model(self) -> str:
        """The model that makes dense vectors."""
        return self.dense_embedding_model or self.embedding_model

    @property
    def default_entries(self) -> types.DefaultEntries:
        """The models that have settings of their own: loaded at the start, and never unloaded."""

        def entry(
            name: str, revision: str | None, task: str = "embed", **own: object
        ) -> types.ModelEntry:
            fixed = {"task": task, "load": "start", "pinned": True}
            return types.ModelEntry.model_validate(
                {"name": name, "revision": revision or None} | fixed | own
            )

        # These are for the model of dense vectors.
        names = ("pooling", "normalize", "query_prompt", "document_prompt")
        own = {each: getattr(self, each) for each in names}
        dense = reranker = None
        if self.dense_model != self.embedding_model:
            dense, own = entry(self.dense_model, self.dense_model_revision, **own), {}
        if self.reranker_model not in {types.LATE_INTERACTION, types.NO_RERANKER}:
            reranker = entry(self.reranker_model, self.reranker_model_revision, "rerank")
        embedder = entry(self.embedding_model, self.model_revision, **own)
        return types.DefaultEntries(embedder, dense, reranker)

    @property
    def reranker_name(self) -> str:
        """The model that scores passages."""
        if self.reranker_model == types.LATE_INTERACTION:
            return self.embedding_model
        return self.reranker_model

    @property
    def asks_for_tokens(self) -> bool:
        """Whether requests must show a token."""
        return self.api_token is not None or self.api_tokens_file is not None

    @property
    def embed_max_length(self) -> int:
        """Token limit of bge-m3: BGE_EMBED_MAX_LENGTH, else the older MAX_INPUT_LENGTH."""
        return self.bge_embed_max_length or self.max_input_length

    @property
    def hub_cache(self) -> Path:
        """The folder of downloaded models; raises `StartupError` if the user has no home folder."""
        try:
            return self.hf_home.expanduser() / "hub"
        except RuntimeError as error:
            raise StartupError(
                f"HF_HOME={self.hf_home} cannot be found: this user has no home folder; set "
                "HF_HOME to a folder for downloaded models"
            ) from error


_SECRETS = {
    name.upper()
    for name, field in Settings.model_fields.items()
    if SecretStr in {field.annotation, *get_args(field.annotation)}
}
_HIDDEN = "**********"
# An address of scheme, host and port, which can hold no password and no key.
_PLAIN_ADDRESS = re.compile(r"(\w+://)?[\w.-]*(:\w*)?/?")


def sections() -> dict[str, list[str]]:
    """The names of the settings, in lower case, under the titles of their groups."""
    groups: dict[str, list[str]] = {}
    for name in Settings.model_fields:
        if name in SECTIONS:
            names = groups[SECTIONS[name]] = []
        names.append(name)
    return groups


def default(name: str) -> str:
    """The default as a user would write it; empty if there is none."""
    value = Settings.model_fields[name].default
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def meaning(name: str) -> str:
    """What the setting does, in Markdown, after the words that it allows, if these are fixed."""
    description = " ".join((Settings.model_fields[name].description or "").split())
    words = choices(Settings.model_fields[name])
    return f"{_either([f'`{word}`' for word in words])}: {description}" if words else description


def without_markup(markdown: str) -> str:
    """The same as plain text."""
    return markdown.replace("`", "")


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that a setting allows; empty if it is not limited to fixed words."""
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def allowed(name: str) -> str:
    """The values that the setting allows."""
    return allowed_in(Settings.model_fields[name]) or f"see {name.upper()} in .env.example"


def allowed_in(field: FieldInfo) -> str:
    """The values that a field allows; empty if its declaration does not say."""
    if field.annotation is bool:
        return "true or false"
    if words := choices(field):
        return _either(words)
    parts = [*field.metadata, *_parts(field.annotation)]
    texts = [each for each in parts if isinstance(each, types.Allowed)]
    # The words of an optional field are nested in its type.
    words_inside = (_either(get_args(each)) for each in parts if get_origin(each) is Literal)
    return texts[0] if texts else next(words_inside, "")


def shown(name: str, value: str) -> str:
    """The value, or asterisks if it may hold a password or a key."""
    address = "://" in value or name in {"HF_ENDPOINT", "OTLP_ENDPOINT"}
    if name in _SECRETS or "@" in value or (address and not _PLAIN_ADDRESS.fullmatch(value)):
        return _HIDDEN
    return value


def _either(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _parts(annotation: object) -> Iterator[object]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)
