"""Settings: the only reader of the environment and of .env.

A value that is not allowed stops the start with one sentence that names the variable, the value and
what is allowed; nothing is ever replaced by a default behind the operator's back. An empty value
counts as not set.
"""

from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import StartupError

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
LATE_INTERACTION = "late-interaction"
NO_RERANKER = "none"
IN_MEMORY = "memory"
INT8 = "int8"
Networks = tuple[IPv4Network | IPv6Network, ...]
DeviceNames = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d+( *, *cuda:\d+)*)$")]


class Settings(BaseSettings):
    """Every setting of the service; the names are those of the environment, in lower case."""

    model_config = SettingsConfigDict(
        env_file=".env",
        env_file_encoding="utf-8",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        validate_default=True,
    )

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000

    embedding_model: str = "BAAI/bge-m3"
    dense_embedding_model: str | None = None
    reranker_model: str = "BAAI/bge-reranker-v2-m3"
    model_revision: str | None = None
    hf_home: Path = Path("~/.cache/huggingface")
    hf_hub_offline: bool = False

    device: DeviceNames = "auto"
    dtype: Literal["auto", "float16", "bfloat16", "float32", "int8"] = "auto"
    attention: Literal[
        "auto", "varlen", "flash_attention_2", "flash_attention_3", "sdpa", "eager"
    ] = "auto"
    max_input_length: PositiveInt = 8192
    bge_embed_max_length: PositiveInt | None = None
    qwen_embed_max_length: PositiveInt = 32_768
    bge_rerank_max_length: PositiveInt = 8192
    qwen_rerank_max_length: PositiveInt = 32_768
    qwen_rerank_batch_size: PositiveInt = 16
    max_batch_tokens: Auto | PositiveInt = "auto"
    max_requests_in_batch: PositiveInt | None = None
    max_batch_sequences: PositiveInt | None = None
    batch_wait_ms: Annotated[float, Field(ge=0, le=1000)] = 0
    tokenizer_threads: Auto | PositiveInt = "auto"
    torch_compile: bool = False

    max_queue_size: PositiveInt = 200
    rerank_max_queue: PositiveInt = 32
    request_timeout: PositiveSeconds = 90
    gpu_process_timeout: PositiveSeconds | None = None
    rerank_gpu_timeout: PositiveSeconds = 60
    shutdown_timeout: PositiveSeconds = 30
    max_sentences_per_request: PositiveInt = 1024
    max_rerank_passages: PositiveInt = 1024
    max_body_bytes: PositiveInt = 33_554_432

    api_token: SecretStr | None = None
    api_tokens_file: Path | None = None
    protect_metrics: bool = False

    rate_limit_requests_per_minute: PositiveInt = 3600
    rate_limit_burst_size: PositiveInt = 120
    # Secret because a Redis address may hold a password.
    rate_limit_store: SecretStr = SecretStr(IN_MEMORY)
    trusted_proxies: Annotated[Networks | None, NoDecode] = None

    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_endpoint: str | None = None

    @field_validator("dtype", "attention", "device", "log_format", "log_level", mode="before")
    @classmethod
    def _fold_case(cls, value: object) -> object:
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator("embedding_model", "dense_embedding_model", "reranker_model")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
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

    @field_validator("trusted_proxies", mode="before")
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
        """Where downloaded models lie."""
        return self.hf_home.expanduser() / "hub"


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


def load_settings() -> Settings:
    """Read the environment and .env; raise `StartupError` naming every value that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        raise StartupError(describe(error)) from None


def describe(error: ValidationError) -> str:
    """One sentence for all that is wrong with the settings."""
    return "; ".join(dict.fromkeys(_describe_one(dict(item)) for item in error.errors()))


def _describe_one(item: dict[str, object]) -> str:
    location = item["loc"]
    if not isinstance(location, tuple) or not location:
        return str(item["msg"]).removeprefix("Value error, ")
    name = str(location[0])
    value = item["input"]
    if name in _SECRETS or "@" in str(value):  # Before an @ in an address a password may stand.
        value = "**********"
    return f"{name.upper()}={value} is not allowed: {_allowed(name)}"


def _allowed(name: str) -> str:
    return _ALLOWED.get(name, f"see {name.upper()} in .env.example")


_SECRETS = {"rate_limit_store"}
_ALLOWED = {
    "port": "a number from 0 to 65535",
    "embedding_model": "a hub id such as BAAI/bge-m3, or a folder",
    "dense_embedding_model": "a hub id such as Qwen/Qwen3-Embedding-0.6B, or a folder",
    "reranker_model": "a hub id or folder of a reranker, late-interaction or none",
    "hf_hub_offline": "true or false",
    "device": "auto, cpu, mps, cuda or GPUs such as cuda:0,cuda:1",
    "dtype": "auto, float16, bfloat16, float32 or int8",
    "attention": "auto, varlen, flash_attention_2, flash_attention_3, sdpa or eager",
    "max_input_length": "a number of tokens, at least 1",
    "bge_embed_max_length": "a number of tokens, at least 1",
    "qwen_embed_max_length": "a number of tokens, at least 1",
    "bge_rerank_max_length": "a number of tokens, at least 1",
    "qwen_rerank_max_length": "a number of tokens, at least 1",
    "qwen_rerank_batch_size": "a number of pairs, at least 1",
    "max_batch_tokens": "auto, or a number of tokens, at least 1",
    "max_requests_in_batch": "a number of requests, at least 1",
    "max_batch_sequences": "a number of sequences, at least 1",
    "batch_wait_ms": "milliseconds from 0 to 1000",
    "tokenizer_threads": "auto, or a number, at least 1",
    "torch_compile": "true or false",
    "max_queue_size": "a number of requests, at least 1",
    "rerank_max_queue": "a number of requests, at least 1",
    "rerank_gpu_timeout": "seconds above 0 and below REQUEST_TIMEOUT",
    "request_timeout": "seconds above 0",
    "gpu_process_timeout": "seconds above 0",
    "shutdown_timeout": "seconds above 0",
    "max_sentences_per_request": "a number, at least 1",
    "max_rerank_passages": "a number, at least 1",
    "max_body_bytes": "a number of bytes, at least 1",
    "protect_metrics": "true or false",
    "rate_limit_requests_per_minute": "a number, at least 1",
    "rate_limit_burst_size": "a number, at least 1",
    "rate_limit_store": "memory, or an address such as redis://user:password@host:6379/0 or rediss://",
    "trusted_proxies": "addresses and networks separated by commas, such as 10.0.0.1,172.16.0.0/12",
    "log_format": "console or json",
    "log_level": "debug, info, warning or error",
    "otlp_endpoint": "the http:// or https:// address of an OTLP receiver, such as "
    "http://localhost:4318, without a user",
}
