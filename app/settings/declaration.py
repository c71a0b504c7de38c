"""Every setting: its name, its default, its meaning and what it may be.

The environment and .env are read here and in `app.settings.sources` alone. Nothing is ever
replaced by a default behind the operator's back; an empty value counts as not set.
"""

import re
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import StartupError

DOTENV = Path(".env")
LATE_INTERACTION = "late-interaction"
NO_RERANKER = "none"
IN_MEMORY = "memory"
INT8 = "int8"
# A name may be a web address by mistake, with a user's password or a key in it.
_ADDRESS = re.compile(r"://|:[^/]*@")


@dataclass(frozen=True, slots=True)
class Allowed:
    """Says, in an annotation, which values a setting takes; told where a value is refused."""

    text: str


def _as_origin(text: str) -> str:
    """An origin as browsers write it: scheme://host[:port], in lower case; `*` is any.

    Raises `ValueError` for an address with a path, a user or no host, and for `null`.
    """
    parts = urlsplit(text.lower().removesuffix("/"))
    if text != "*" and (parts[2:] != ("", "", "") or not parts.hostname or "@" in parts.netloc):
        raise ValueError("no origin")
    _ = parts.port  # Raises where it is no port.
    default = {"http": 80, "https": 443}.get(parts.scheme)
    netloc = parts.netloc.removesuffix(f":{default}")
    return text if text == "*" else f"{parts.scheme}://{netloc}"


Auto = Literal["auto"]
Networks = tuple[IPv4Network | IPv6Network, ...]
Port = Annotated[int, Field(ge=0, le=65535), Allowed("a number from 0 to 65535")]
Count = Annotated[int, Field(ge=1), Allowed("a number, at least 1")]
Tokens = Annotated[int, Field(ge=1), Allowed("a number of tokens, at least 1")]
Pairs = Annotated[int, Field(ge=1), Allowed("a number of pairs, at least 1")]
Requests = Annotated[int, Field(ge=1), Allowed("a number of requests, at least 1")]
Sequences = Annotated[int, Field(ge=1), Allowed("a number of texts or pairs, at least 1")]
Bytes = Annotated[int, Field(ge=1), Allowed("a number of bytes, at least 1")]
AutoTokens = Annotated[Auto | Tokens, Allowed("auto, or a number of tokens, at least 1")]
AutoCount = Annotated[Auto | Count, Allowed("auto, or a number, at least 1")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("seconds above 0")]
RerankSeconds = Annotated[Seconds, Allowed("seconds above 0 and below REQUEST_TIMEOUT")]
Milliseconds = Annotated[float, Field(ge=0, le=1000), Allowed("milliseconds from 0 to 1000")]
EmbeddingModel = Annotated[str, Allowed("a hub id such as BAAI/bge-m3, or a folder")]
DenseModel = Annotated[str, Allowed("a hub id such as Qwen/Qwen3-Embedding-0.6B, or a folder")]
RerankerModel = Annotated[
    str, Allowed("a hub id or folder of a reranker, late-interaction or none")
]
DeviceNames = Annotated[
    str,
    Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d+( *, *cuda:\d+)*)$"),
    Allowed("auto, cpu, mps, cuda or GPUs such as cuda:0,cuda:1"),
]
Store = Annotated[
    SecretStr,
    Allowed("memory, or an address such as redis://user:password@host:6379/0 or rediss://"),
]
Proxies = Annotated[
    Networks,
    Allowed("addresses and networks separated by commas, such as 10.0.0.1,172.16.0.0/12"),
]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_as_origin)], ...],
    Allowed("origins separated by commas, such as https://app.example.com, or *"),
]
Collector = Annotated[
    str,
    Allowed(
        "the http:// or https:// address of an OTLP receiver, such as http://localhost:4318, "
        "without a user"
    ),
]


class Settings(BaseSettings):
    """Every setting of the service; the names are those of the environment, in lower case.

    A field's description is what `python -m app --help` says of it.
    """

    model_config = SettingsConfigDict(
        env_file=DOTENV,
        env_file_encoding="utf-8-sig",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        hide_input_in_errors=True,  # There may be a password in an address.
        validate_default=True,
    )

    host: str = Field("127.0.0.1", description="the address to listen on")
    port: Port = Field(8000, description="the port; 0 takes a free one and logs it")

    embedding_model: EmbeddingModel = Field(
        "BAAI/bge-m3", description="a hub id, or a folder with a model of bge-m3's shape"
    )
    dense_embedding_model: DenseModel | None = Field(
        None,
        description="a dense model of its own, such as Qwen/Qwen3-Embedding-0.6B; not set, "
        "EMBEDDING_MODEL makes every kind",
    )
    reranker_model: RerankerModel = Field(
        "BAAI/bge-reranker-v2-m3",
        description="a hub id or folder of a reranker; late-interaction, where EMBEDDING_MODEL "
        "scores the passages itself; or none",
    )
    model_revision: str | None = Field(
        None, description="a branch, tag or commit of EMBEDDING_MODEL on the hub"
    )
    dense_model_revision: str | None = Field(None, description="the same of DENSE_EMBEDDING_MODEL")
    reranker_model_revision: str | None = Field(None, description="the same of RERANKER_MODEL")
    hf_home: Path = Field(
        Path("~/.cache/huggingface"), description="where downloaded models are kept"
    )
    hf_hub_offline: bool = Field(
        False, description="whether the hub is left alone and only what is on the disk is used"
    )

    device: DeviceNames = Field(
        "auto", description="auto, cpu, mps, cuda, or GPUs such as cuda:0,cuda:1"
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32", "int8"] = Field(
        "auto", description="the number format: auto, float16, bfloat16, float32 or int8"
    )
    attention: Literal[
        "auto",
        "varlen",
        "flash_attention_2",
        "flash_attention_3",
        "native",
        "matmul",
        "sdpa",
        "eager",
    ] = Field("auto", description="the attention kernel: auto, or a name that /health can show")
    pytorch_cuda_alloc_conf: str = Field(
        "expandable_segments:True", description="options of PyTorch's memory allocator on a GPU"
    )

    bge_embed_max_length: Tokens | None = Field(
        None, description="the most of a text that bge-m3 reads; not set, MAX_INPUT_LENGTH counts"
    )
    max_input_length: Tokens = Field(8192, description="the older name of the same")
    qwen_embed_max_length: Tokens = Field(
        32_768, description="the most of a text that a Qwen3 dense model reads"
    )
    bge_rerank_max_length: Tokens = Field(
        8192, description="the most of a query and a passage together for bge-reranker"
    )
    qwen_rerank_max_length: Tokens = Field(
        32_768, description="the same for Qwen3-Reranker, its template included"
    )

    max_batch_tokens: AutoTokens = Field(
        "auto", description="tokens of one forward; auto measures at the start"
    )
    max_requests_in_batch: Requests | None = Field(
        None, description="the most requests in one forward; not set, as many as fit"
    )
    max_batch_sequences: Sequences | None = Field(
        None, description="the most texts or pairs in one forward; not set, as many as fit"
    )
    batch_wait_ms: Milliseconds = Field(
        0, description="milliseconds to wait for company before a batch is formed"
    )
    tokenizer_threads: AutoCount = Field("auto", description="threads that tokenise")
    torch_compile: bool = Field(False, description="models on a GPU through PyTorch's compiler")
    qwen_rerank_batch_size: Pairs = Field(
        16, description="the most pairs in one forward of Qwen3-Reranker"
    )

    max_queue_size: Requests = Field(
        200, description="embedding requests that may wait; more are refused with 503"
    )
    request_timeout: Seconds = Field(90, description="seconds for a whole request (504)")
    gpu_process_timeout: Seconds | None = Field(
        None,
        description="seconds for one embedding forward (504); not set, 15 on a GPU and 30 on a "
        "CPU, or five times what the start predicts for the batch, where that is more",
    )
    rerank_max_queue: Requests = Field(
        32, description="rerank requests accepted at once; more are refused with 503"
    )
    rerank_gpu_timeout: RerankSeconds = Field(
        60, description="seconds that one rerank request may spend in forwards (504)"
    )
    shutdown_timeout: Seconds = Field(
        30, description="seconds to finish accepted work after SIGTERM"
    )
    max_sentences_per_request: Count = Field(1024, description="texts of one request (422)")
    max_rerank_passages: Count = Field(1024, description="passages of one request (422)")
    max_body_bytes: Bytes = Field(33_554_432, description="bytes of one body (413)")

    api_token: SecretStr | None = Field(
        None, description="the token that every POST must show; a flag is seen by every process"
    )
    api_tokens_file: Path | None = Field(
        None, description="a file of named tokens, one name:token a line"
    )
    protect_metrics: bool = Field(
        False, description="whether /stats and /metrics ask for a token too"
    )

    rate_limit_burst_size: Count = Field(
        120, description="POST requests that one client may send at once"
    )
    rate_limit_requests_per_minute: Count = Field(
        3600, description="and then so many a minute; more are refused with 429"
    )
    # Secret because a Redis address may hold a password.
    rate_limit_store: Store = Field(
        SecretStr(IN_MEMORY),
        description="memory, or the redis:// address of a store that replicas share",
    )
    trusted_proxies: Annotated[Proxies | None, NoDecode] = Field(
        None,
        description="addresses and networks, separated by commas, that may name a client in "
        "X-Forwarded-For",
    )
    cors_origins: Annotated[Origins | None, NoDecode] = Field(
        None,
        description="origins of web pages, separated by commas, that may call the service from a "
        "browser; * is any",
    )

    log_format: Literal["console", "json"] = Field("console", description="console or json")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning or error"
    )
    otlp_endpoint: Collector | None = Field(
        None, description="an OpenTelemetry collector that speaks OTLP over HTTP"
    )
    otel_service_name: str = Field("smart-embedder", description="the service's name in its traces")

    @field_validator("dtype", "attention", "device", "log_format", "log_level", mode="before")
    @classmethod
    def _fold_case(cls, value: object) -> object:
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator("embedding_model", "dense_embedding_model", "reranker_model")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or _ADDRESS.search(value)):
            raise ValueError("a hub id or a folder")
        return value.strip() if value else value

    @field_validator("reranker_model")
    @classmethod
    def _fold_keywords(cls, value: str) -> str:
        return value.lower() if value.lower() in {LATE_INTERACTION, NO_RERANKER} else value

    @field_validator("rate_limit_store")
    @classmethod
    def _memory_or_redis(cls, value: SecretStr) -> SecretStr:
        text = value.get_secret_value().strip()
        if text.lower() == IN_MEMORY:
            return SecretStr(IN_MEMORY)
        _check_redis_address(text)
        return SecretStr(text)

    @field_validator("otlp_endpoint")
    @classmethod
    def _http_address(cls, value: str | None) -> str | None:
        if value is not None:
            value = value.strip()
            _check_http_address(value)
        return value

    @field_validator("trusted_proxies", "cors_origins", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _float16_needs_a_gpu(self) -> "Settings":
        if self.dtype == "float16" and self.device == "cpu":
            raise ValueError("DTYPE=float16 is for GPUs; with DEVICE=cpu use bfloat16 or float32")
        return self

    @model_validator(mode="after")
    def _int8_needs_the_cpu(self) -> "Settings":
        if self.dtype == INT8 and self.device.startswith(("cuda", "mps")):
            raise ValueError(f"DTYPE=int8 is for CPUs; with DEVICE={self.device} use auto")
        return self

    @model_validator(mode="after")
    def _rerank_ends_before_the_request(self) -> "Settings":
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
    def reranker_name(self) -> str:
        """The model that scores passages."""
        if self.reranker_model == LATE_INTERACTION:
            return self.embedding_model
        return self.reranker_model

    @property
    def shared_rate_limit_store(self) -> str | None:
        """The address of the Redis that replicas share; None where each counts for itself."""
        store = self.rate_limit_store.get_secret_value()
        return None if store == IN_MEMORY else store

    @property
    def embed_max_length(self) -> int:
        """Token limit of bge-m3: BGE_EMBED_MAX_LENGTH, else the older MAX_INPUT_LENGTH."""
        return self.bge_embed_max_length or self.max_input_length

    @property
    def hub_cache(self) -> Path:
        """Where downloaded models lie; raises `StartupError` where there is no home folder."""
        try:
            return self.hf_home.expanduser() / "hub"
        except RuntimeError as error:
            raise StartupError(
                f"HF_HOME={self.hf_home} cannot be found: this user has no home folder; set "
                "HF_HOME to a folder for downloaded models"
            ) from error


def _check_redis_address(text: str) -> None:
    """Raise `ValueError` unless `text` is redis[s]://[user:password@]host[:port][/number]."""
    parts = urlsplit(text)
    _ = parts.port  # Raises where it is no port.
    number = parts.path.removeprefix("/")
    if (
        parts.scheme not in {"redis", "rediss"}
        or not parts.hostname
        or not (number.isdecimal() or not number)
        or parts.query
        or parts.fragment
    ):
        raise ValueError("no Redis address")


def _check_http_address(text: str) -> None:
    """Raise `ValueError` unless `text` is http[s]://host[:port][/path], with no user in it."""
    parts = urlsplit(text)
    _ = parts.port  # Raises where it is no port.
    plain = not (parts.query or parts.fragment or "@" in parts.netloc or " " in text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not plain:
        raise ValueError("no HTTP address")
