"""The service's settings: flags win over the environment, which wins over .env.

A value that is not allowed stops the start with one sentence that names the setting, the value and
the allowed values. An unknown name in .env stops the start, too; in the environment it only causes
a warning. An empty value counts as not set. Variables of libraries are not settings, but .env may
hold them; they are then set in the environment.

`--help`, .env.example and the tables of docs/configuration.md are generated from `Settings`: run
`python -m scripts.settings_docs` after a change.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn
from urllib.parse import SplitResult, urlsplit

from dotenv import dotenv_values
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict

from smart_embedder import other_servers
from smart_embedder.errors import StartupError
from smart_embedder.models_file import read_model_entries
from smart_embedder.settings import (
    LIBRARY_VARIABLES,
    Allowed,
    AllowedAddress,
    AnyCase,
    AtLeast1,
    Count,
    EngineSettings,
    Seconds,
    advice,
    choices,
    either,
    explain,
)

DOTENV = Path(".env")
# The settings of --demo: the small model of tools.demo does everything, and the hub is not used.
_DEMO_FOLDER = "smart-embedder-demo"
_DEMO = {
    "embedding_model": _DEMO_FOLDER,
    "dense_embedding_model": _DEMO_FOLDER,
    "reranker_model": "late-interaction",
    "hf_hub_offline": "true",
}
# In names up to this length, two differences make another word, as in HOME and HOST.
_SHORT = 5
# A scheme, except those of web pages, which have too many origins.
_SCHEME = re.compile(r"(?!https?$)[a-z][a-z0-9+.-]*")
# Low enough for two swapped pairs of letters in the shortest of the longer names.
_ALIKE = 0.5
_ABOUT = """\
Serve embeddings and reranking over HTTP. If the client's package is installed, too,
`smart-embedder ingest`, `search` and `check` fill, search and check a Qdrant collection; each has
its own --help.

Every flag can also be set in the environment or in .env, in capitals and with underscores:
--max-queue-size is MAX_QUEUE_SIZE. A flag wins over the environment, which wins over .env. Every
user of the machine can read the flags of a process: keep secrets in .env.
"""
# Read by docker compose from .env; scripts/settings_docs.py describes them.
COMPOSE_VARIABLES = {
    "MEMORY_LIMIT",
    "MONITORING_MEMORY_LIMIT",
    "QDRANT_MEMORY_LIMIT",
    "HTTPS_MEMORY_LIMIT",
    "PIDS_LIMIT",
    "STOP_GRACE_PERIOD",
    "HF_CACHE_VOLUME",
    "MODELS_FOLDER",
    "DOMAIN",
    "HTTPS_NETWORK",
    "UPSTREAMS",
    "PROMETHEUS_PORT",
    "GRAFANA_PORT",
    "QDRANT_PORT",
    "QDRANT_GRPC_PORT",
    "QDRANT__SERVICE__API_KEY",
    "COMPOSE_FILE",
    "COMPOSE_PROFILES",
    "COMPOSE_PROJECT_NAME",
}
# Settings of earlier versions, and what replaced them.
REMOVED = {
    "EMBEDDING_CACHE": "EMBEDDING_CACHE_BYTES above 0 switches the cache on, one for each process",
    "MAX_ANSWER_BYTES": "an answer may hold 36 MiB, and 10 bytes for each byte of its body",
    "RATE_LIMIT_STORE": "each process counts by itself; a gateway can limit several together",
    "REPLAY_LOG": "requests are not recorded any more: `tools.verify --space` compares two servers",
    "REPLAY_LOG_BYTES": "requests are not recorded any more",
    "STATE_DIR": "a start compares no vectors: `tools.verify --space` does, as a job or in CI",
    "TORCH_COMPILE": "it had no effect, as the service has its own kernels",
}


def _split_pairs(value: object) -> object:
    """Parse `alias=model` pairs, separated by commas."""
    if not isinstance(value, str):
        return value
    pairs = {}
    for pair in value.split(","):
        alias, _, model = (side.strip() for side in pair.partition("="))
        if not (alias and model):
            raise ValueError("no alias=model")
        pairs[alias] = model
    return pairs


def _split_url(text: str) -> SplitResult:
    """Split a URL; raise `ValueError` if its port is not a number."""
    parts = urlsplit(text)
    _ = parts.port
    return parts


def _parse_origin(text: str) -> str:
    """Write an origin as browsers do: scheme://host[:port], in lower case; `*` stays.

    A scheme of applications, such as `vscode-webview://`, stays, too: it means all its origins.
    Raises `ValueError` for a URL with a path, a user or no host, and for `null`.
    """
    scheme = text.lower().removesuffix("://")
    if text == "*" or (text.endswith("://") and _SCHEME.fullmatch(scheme)):
        return text.lower()
    parts = _split_url(text.lower().removesuffix("/"))
    if parts[2:] != ("", "", "") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("no origin")
    default_port = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.netloc.removesuffix(f':{default_port}')}"


def _parse_http_url(text: str) -> str:
    """Require http[s]://host[:port][/path], without a user."""
    text = text.strip()
    parts = _split_url(text)
    plain = not (parts.query or parts.fragment or "@" in parts.netloc or " " in text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not plain:
        raise ValueError("no HTTP address")
    return text


_CommaSeparated = BeforeValidator(
    lambda text: [part.strip() for part in text.split(",")] if isinstance(text, str) else text
)
Port = Annotated[int, Field(ge=0, le=65535), Allowed("a number from 0 to 65535")]
Bytes = Annotated[int, AtLeast1, Allowed("a number of bytes, at least 1")]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("seconds, at least 0")]
ModelAliases = Annotated[
    dict[str, str],
    BeforeValidator(_split_pairs),
    Allowed("alias=model separated by commas, such as text-embedding-3-small=BAAI/bge-m3"),
]
TokenIds = Annotated[Literal["cl100k", "o200k"], AnyCase]
LogFormat = Annotated[Literal["console", "json"], AnyCase]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], AnyCase]
Proxies = Annotated[
    tuple[IPv4Network | IPv6Network, ...],
    _CommaSeparated,
    Allowed("addresses and networks separated by commas, such as 10.0.0.1,172.16.0.0/12"),
]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_parse_origin)], ...],
    _CommaSeparated,
    Allowed("origins separated by commas, such as https://app.example.com, or *"),
]
Collector = Annotated[
    str,
    AfterValidator(_parse_http_url),
    AllowedAddress(
        "the http:// or https:// address of an OTLP receiver, such as http://localhost:4318, "
        "without a user"
    ),
]
# The title of each section of settings; a section ends where the next of these settings begins.
SECTIONS = {
    "host": "Address",
    "embedding_model": "Models",
    "model_aliases": "Models",
    "device": "Hardware",
    "bge_embed_max_length": "Lengths, in tokens",
    "max_batch_tokens": "Batching",
    "embedding_cache_bytes": "Cache",
    "max_queue_size": "Limits",
    "request_timeout": "Limits",
    "api_token": "Access",
    "rate_limit_burst_size": "Rate limit",
    "log_format": "Logs",
    "otlp_endpoint": "Traces",
}


class Settings(EngineSettings, BaseSettings):
    """The settings of the service; those that are not passed are read from the environment.

    `load_settings` reads .env and flags as well. Raises `ValidationError` as `EngineSettings` does,
    and `StartupError` for an error in the file of MODELS.
    """

    model_config = SettingsConfigDict(
        dotenv_filtering="only_existing",
        enable_decoding=False,  # Lists are separated by commas and are not JSON.
        env_file_encoding="utf-8-sig",
        env_ignore_empty=True,
    )

    host: str = "127.0.0.1"
    """address to listen on; `::` is IPv6 and IPv4; `0.0.0.0` in the container"""
    port: Port = 8000
    """port; 0 takes a free one and logs it"""
    ui: bool = True
    """serve the page at `/ui`"""
    model_aliases: ModelAliases | None = None
    """further names of models, such as
    `text-embedding-3-small=BAAI/bge-m3,rerank-v3.5=BAAI/bge-reranker-v2-m3`"""
    token_ids: TokenIds | None = None
    """table that decodes the token ids that OpenAI's clients send instead of texts (400 without
    it)"""
    tiktoken_cache_dir: Path | None = None
    """folder with this table's file, under tiktoken's name; not needed if litellm or
    llama-index-core is installed"""

    request_timeout: Seconds = 90
    """seconds of a whole request, until its response is rendered (504)"""
    shutdown_timeout: Seconds = 30
    """seconds to finish accepted work after SIGTERM"""
    shutdown_delay: Delay = 0
    """seconds after SIGTERM, before `SHUTDOWN_TIMEOUT`, in which requests are still accepted while
    `/health` is 503 for load balancers"""
    max_sentences_per_request: Count = 1024
    """texts in a request (422); OpenAI's paths take at least 2,048"""
    max_rerank_passages: Count = 1024
    """passages in a request (422)"""
    max_body_bytes: Bytes = 16_777_216
    """bytes of a body (413, before it is read whole)"""

    api_token: SecretStr | None = None
    """token that requests must send as `Authorization: Bearer <token>`; with neither this nor
    `API_TOKENS_FILE`, none is needed. Every user of the machine can read a flag"""
    api_tokens_file: Path | None = None
    """file of named tokens, one `name:token` a line, with its limits below it; read again when it
    changes; lines that begin with `#` are comments"""
    protect_metrics: bool = False
    """require a token for `/stats` and `/metrics`, too"""
    cors_origins: Origins | None = None
    """comma-separated origins of web pages and extensions that may call the service, such as
    `https://app.example.com`, `app://obsidian.md`, `vscode-webview://` (every origin with this
    scheme), or `*`; others get 403"""

    rate_limit_burst_size: Count = 120
    """requests for vectors, scores or tokens that one client may send at once"""
    rate_limit_requests_per_minute: Count = 3600
    """such requests a minute that one client may send after its burst; more get 429"""
    trusted_proxies: Proxies | None = None
    """comma-separated addresses and networks of proxies whose `X-Forwarded-For` is trusted"""

    log_format: LogFormat = "console"
    """format of the log; `json` writes one object a line"""
    log_level: LogLevel = "info"
    """lowest level that is logged; a `GET` is logged at debug unless it gets 4xx"""

    otlp_endpoint: Collector | None = None
    """OpenTelemetry collector for OTLP over HTTP, such as `http://localhost:4318`; spans go to its
    `/v1/traces`. It must not contain a user or a query; only host and port are logged"""

    @field_validator("models", mode="before")
    @classmethod
    def _read_models(cls, value: object) -> object:
        return read_model_entries(Path(value)) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_time_limits(self) -> "Settings":
        if self.rerank_gpu_timeout >= self.request_timeout:
            raise ValueError(
                f"RERANK_GPU_TIMEOUT={self.rerank_gpu_timeout:g} must be below "
                f"REQUEST_TIMEOUT={self.request_timeout:g}"
            )
        return self

    @property
    def requires_token(self) -> bool:
        """Whether requests need a token."""
        return self.api_token is not None or self.api_tokens_file is not None


_SETTINGS = {name.upper() for name in Settings.model_fields}
_KNOWN = _SETTINGS | LIBRARY_VARIABLES | COMPOSE_VARIABLES


def load_settings(arguments: Sequence[str] = ()) -> Settings:
    """Read the settings from the command line's `arguments`, the environment and .env.

    Copies variables of libraries from .env to the environment. With `--help` it prints the flags
    and ends the process. Raises `StartupError`, which names all that is wrong with the settings.
    """
    flags: dict[str, Any] = parse_flags(arguments)
    _export_library_variables(_read_dotenv())
    try:
        return Settings(_env_file=DOTENV, **flags)
    except ValidationError as error:
        raise StartupError(explain(error, Settings)) from None


def _read_dotenv() -> dict[str, str | None]:
    """Return the variables in .env; raise `StartupError` for unknown names."""
    if not DOTENV.is_file():
        return {}
    try:
        variables = dotenv_values(DOTENV, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{DOTENV} cannot be read: {error}") from error
    wrong, known = [], sorted(map(str.lower, _KNOWN))
    for name in variables:
        if name.upper() in REMOVED:
            wrong.append(f".env sets {removed_setting(name)}")
        elif name.upper() not in _KNOWN:
            found = advice(name.upper(), str.upper, known)
            wrong.append(f".env sets {name}, which is not a setting: {found}")
    if wrong:
        raise StartupError("; ".join(wrong))
    return variables


def _export_library_variables(variables: Mapping[str, str | None]) -> None:
    """Set the libraries' variables in the environment, except those that are set there."""
    already_set = {name.upper() for name, value in os.environ.items() if value}
    for name, value in variables.items():
        if value and name.upper() in LIBRARY_VARIABLES - already_set:
            os.environ[name.upper()] = value


def removed_setting(name: str) -> str:
    """Describe a setting that was removed."""
    return f"{name}, which was removed: {REMOVED[name.upper()]}"


def unknown_names(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Yield unknown names in the environment, each with the setting that was probably meant.

    A name is reported if it is a setting of another server, or if one or two letters differ from a
    setting of this one.
    """
    for name in sorted(environment):
        upper = name.upper()
        if (ours := other_servers.settings_for(upper, Settings.model_fields)) is not None:
            yield name, ours
            continue
        # `UI` has none: CI and UID, which build machines and shells set, differ by a letter.
        near = [
            setting for setting in _SETTINGS - {upper, "UI"} if _has_same_letters(upper, setting)
        ]
        if upper not in _KNOWN and (found := get_close_matches(upper, near, cutoff=_ALIKE)):
            yield name, found[0]


def _has_same_letters(name: str, setting: str) -> bool:
    """Whether all letters except one or two are the same, in any order."""
    allowed = 1 if len(setting) <= _SHORT else 2
    if abs(len(name) - len(setting)) > allowed:
        return False
    letters, expected = Counter(name), Counter(setting)
    return max((letters - expected).total(), (expected - letters).total()) <= allowed


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Return the settings that flags give, by name in lower case; empty values are left out.

    Raises `StartupError` for an unknown flag; `--help` prints all flags and ends the process.
    """
    known, unknown = _create_parser().parse_known_args(arguments)
    if not unknown:
        flags = vars(known)
        demo = _DEMO if flags.pop("demo", False) else {}
        return demo | {name: value for name, value in flags.items() if value}
    flag = unknown[0].partition("=")[0]
    if (name := flag.removeprefix("--").replace("-", "_").upper()) in REMOVED:
        raise StartupError(f"there is no flag {removed_setting(name)}")
    if not flag.startswith("-"):
        raise StartupError("flags begin with --, and one of the arguments belongs to no flag")
    found = advice("--" + flag.lstrip("-"), _flag, Settings.model_fields)
    raise StartupError(f"there is no flag {flag}: {found}; --help lists all")


def _flag(name: str) -> str:
    """Return the flag of a setting. A variable of a library has no flag, so it is described."""
    if name.upper() in LIBRARY_VARIABLES:
        return f"the variable {name.upper()}, in the environment or in .env"
    return "--" + name.replace("_", "-")


def _create_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m app",
        usage="python -m app [--SETTING VALUE ...]",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--demo",
        action="store_true",
        help=f"serve the small model in ./{_DEMO_FOLDER}, which the images hold and "
        "start_server --demo makes",
    )
    for title, names in sections().items():
        group = parser.add_argument_group(title)
        for name in names:
            ending = f" (default: {default(name)})" if default(name) else ""
            about = f"{without_markup(meaning(name))}{ending}".replace("%", "%%")
            if Settings.model_fields[name].annotation is bool:
                group.add_argument(
                    _flag(name), help=about, metavar="true|false", nargs="?", const="true"
                )
            else:
                group.add_argument(_flag(name), help=about, metavar="VALUE")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the message; argparse would print it after a usage of fifty flags."""
        raise StartupError(message)


def sections() -> dict[str, list[str]]:
    """Return the names of the settings, in lower case, by the titles of their sections."""
    groups: dict[str, list[str]] = {title: [] for title in SECTIONS.values()}
    title = ""
    for name in Settings.model_fields:
        title = SECTIONS.get(name, title)
        groups[title].append(name)
    return groups


def default(name: str) -> str:
    """Return the default as a user would write it, or an empty string if there is none."""
    value = Settings.model_fields[name].default
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def meaning(name: str) -> str:
    """Describe the setting in Markdown, after the words that it allows, if any."""
    field = Settings.model_fields[name]
    description = " ".join((field.description or "").split())
    words = [f"`{word}`" for word in choices(field)]
    return f"{either(words)}: {description}" if words else description


def without_markup(markdown: str) -> str:
    """Return the text without backquotes."""
    return markdown.replace("`", "")
