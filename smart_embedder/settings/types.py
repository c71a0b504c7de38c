"""The types of settings: which values are allowed, how they are checked, and how errors say so."""

import os
import re
from functools import cache
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

LATE_INTERACTION = "late-interaction"
NO_RERANKER = "none"
INT8 = "int8"
FLOAT8 = "float8"
# A name may be a web address by mistake, with a user's password or a key in it.
_ADDRESS = re.compile(r"://|:[^/]*@")


class Allowed(str):
    """The text, in a type's annotation, that tells which values are allowed."""

    __slots__ = ()


def _split_pairs(value: object) -> object:
    """`alias=model` pairs, separated by commas."""
    if not isinstance(value, str):
        return value
    pairs = {}
    for part in value.split(","):
        alias, _, model = (each.strip() for each in part.partition("="))
        if not (alias and model):
            raise ValueError("no alias=model")
        pairs[alias] = model
    return pairs


def _as_model(text: str) -> str:
    """A hub id or a folder, not an address."""
    if not text.strip() or _ADDRESS.search(text):
        raise ValueError("a hub id or a folder")
    return text.strip()


def _as_reranker(text: str) -> str:
    name = _as_model(text)
    return name.lower() if name.lower() in {LATE_INTERACTION, NO_RERANKER} else name


def _parts(text: str) -> SplitResult:
    """Split an address; raise `ValueError` where its port is no number."""
    parts = urlsplit(text)
    _ = parts.port
    return parts


def _as_origin(text: str) -> str:
    """An origin as browsers write it: scheme://host[:port], in lower case; `*` is any.

    Raises `ValueError` for an address with a path, a user or no host, and for `null`.
    """
    if text == "*":
        return text
    parts = _parts(text.lower().removesuffix("/"))
    if parts[2:] != ("", "", "") or not parts.hostname or "@" in parts.netloc:
        raise ValueError("no origin")
    default = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.netloc.removesuffix(f':{default}')}"


def _as_http_address(text: str) -> str:
    """http[s]://host[:port][/path], with no user in it."""
    text = text.strip()
    parts = _parts(text)
    plain = not (parts.query or parts.fragment or "@" in parts.netloc or " " in text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not plain:
        raise ValueError("no HTTP address")
    return text


_AnyCase = BeforeValidator(lambda text: text.strip().lower() if isinstance(text, str) else text)
_CommaSeparated = BeforeValidator(
    lambda text: [part.strip() for part in text.split(",")] if isinstance(text, str) else text
)
_AtLeast1 = Field(ge=1)

Auto = Literal["auto"]
Port = Annotated[int, Field(ge=0, le=65535), Allowed("a number from 0 to 65535")]
Count = Annotated[int, _AtLeast1, Allowed("a number, at least 1")]
Tokens = Annotated[int, _AtLeast1, Allowed("a number of tokens, at least 1")]
Pairs = Annotated[int, _AtLeast1, Allowed("a number of pairs, at least 1")]
Requests = Annotated[int, _AtLeast1, Allowed("a number of requests, at least 1")]
Sequences = Annotated[int, _AtLeast1, Allowed("a number of texts or pairs, at least 1")]
Bytes = Annotated[int, _AtLeast1, Allowed("a number of bytes, at least 1")]
CacheBytes = Annotated[int, Field(ge=0), Allowed("a number of bytes, or 0 for no cache")]
AutoTokens = Annotated[Auto | Tokens, Allowed("auto, or a number of tokens, at least 1")]
AutoCount = Annotated[Auto | Count, Allowed("auto, or a number, at least 1")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("seconds above 0")]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False), Allowed("seconds, at least 0")]
RerankSeconds = Annotated[Seconds, Allowed("seconds above 0 and below REQUEST_TIMEOUT")]
Milliseconds = Annotated[float, Field(ge=0, le=1000), Allowed("milliseconds from 0 to 1000")]
EmbeddingModel = Annotated[
    str, AfterValidator(_as_model), Allowed("a hub id such as BAAI/bge-m3, or a folder")
]
DenseModel = Annotated[
    str,
    AfterValidator(_as_model),
    Allowed("a hub id such as Qwen/Qwen3-Embedding-0.6B, or a folder"),
]
RerankerModel = Annotated[
    str,
    AfterValidator(_as_reranker),
    Allowed("a hub id or folder of a reranker, late-interaction or none"),
]
Pooling = Annotated[
    Literal["cls", "last_token", "max", "mean", "mean_sqrt_length", "weighted_mean"], _AnyCase
]
# A prompt is tokenised with each text.
MAX_PROMPT_CHARACTERS = 4096
Prompt = Annotated[
    str,
    Field(max_length=MAX_PROMPT_CHARACTERS, strict=True),
    Allowed(
        f"a text of at most {MAX_PROMPT_CHARACTERS:,} characters, in quotes if it ends with a space"
    ),
]
ModelAliases = Annotated[
    dict[str, str],
    BeforeValidator(_split_pairs),
    Allowed("alias=model separated by commas, such as text-embedding-3-small=BAAI/bge-m3"),
]
Share = Annotated[
    float, Field(gt=0, le=1, allow_inf_nan=False), Allowed("a number above 0, at most 1")
]
DeviceNames = Annotated[
    str,
    _AnyCase,
    Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d+( *, *cuda:\d+)*|cpu:\d+( *, *cpu:\d+)*)$"),
    Allowed("auto, cpu, mps, cuda, GPUs such as cuda:0,cuda:1, or CPU workers such as cpu:0,cpu:1"),
]
Dtype = Annotated[Literal["auto", "float16", "bfloat16", "float32", "int8", "float8"], _AnyCase]
Attention = Annotated[
    Literal[
        "auto",
        "varlen",
        "flash_attention_2",
        "flash_attention_3",
        "native",
        "matmul",
        "sdpa",
        "eager",
    ],
    _AnyCase,
]
LogFormat = Annotated[Literal["console", "json"], _AnyCase]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], _AnyCase]
Proxies = Annotated[
    tuple[IPv4Network | IPv6Network, ...],
    _CommaSeparated,
    Allowed("addresses and networks separated by commas, such as 10.0.0.1,172.16.0.0/12"),
]
Origins = Annotated[
    tuple[Annotated[str, AfterValidator(_as_origin)], ...],
    _CommaSeparated,
    Allowed("origins separated by commas, such as https://app.example.com, or *"),
]
HubAddress = Annotated[
    str,
    AfterValidator(_as_http_address),
    Allowed("the http:// or https:// address of a model hub, without a user"),
]
Collector = Annotated[
    str,
    AfterValidator(_as_http_address),
    Allowed(
        "the http:// or https:// address of an OTLP receiver, such as http://localhost:4318, "
        "without a user"
    ),
]


_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@cache
def public_name(model: str) -> str:
    """The hub id, or the last part of a local folder's path.

    `model` is a setting's value. The path of a folder never leaves the machine.
    """
    # Unlike pathlib's, this one does not raise where there is no home folder.
    folder = Path(os.path.expanduser(model))  # noqa: PTH111
    if _HUB_ID.fullmatch(model) and not folder.is_dir():
        return model
    # Absolute, because . and .. are no names; links are not followed, to keep the name of the link.
    return re.split(r"[/\\]", os.path.abspath(folder))[-1] or "model"  # noqa: PTH100


_Name = Annotated[str, Field(min_length=1, strict=True)]


class ModelEntry(BaseModel):
    """A model of the file, or one with settings of its own; None is the setting of that name.

    `location` is its file and line, for messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: EmbeddingModel
    task: Literal["embed", "rerank"] = "embed"
    aliases: Annotated[
        tuple[_Name, ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Allowed("a name, or a list of names"),
    ] = ()
    revision: Annotated[_Name | None, Allowed("a branch, tag or commit, in quotes")] = None
    device: DeviceNames | None = None
    dtype: Dtype | None = None
    max_length: Tokens | None = None
    pooling: Pooling | None = None
    normalize: Annotated[bool | None, Field(strict=True)] = None
    query_prompt: Prompt | None = None
    document_prompt: Prompt | None = None
    load: Literal["start", "first_use"] = "first_use"
    pinned: Annotated[bool, Field(strict=True)] = False
    location: str = "MODELS"

    @property
    def public_name(self) -> str:
        """The name that answers carry: its hub id, or the last part of its folder's path."""
        return public_name(self.name)


class DefaultEntries(NamedTuple):
    """The models that have settings of their own, as entries.

    `dense` and `reranker` are None where `embedder` does their work, or nobody does.
    """

    embedder: ModelEntry
    dense: ModelEntry | None
    reranker: ModelEntry | None
