"""The settings of the engine, the types of their values, and error messages about them.

`EngineSettings` reads neither the environment nor files: a program gives the values. The service
adds its own settings in `app/settings.py`, and reads all of them there. A value that is not allowed
is never replaced by the default: it is an error that names the setting, the value and the allowed
values.
"""

import os
import re
from collections.abc import Callable, Collection, Iterator
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from smart_embedder import other_servers
from smart_embedder.errors import StartupError

LATE_INTERACTION = "late-interaction"
NO_RERANKER = "none"
INT8 = "int8"
FLOAT8 = "float8"
# Environment variables of libraries. The service copies their values from .env to the environment.
LIBRARY_VARIABLES = {
    "HF_TOKEN",
    "HF_ENDPOINT",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "PYTORCH_CUDA_ALLOC_CONF",
    "OTEL_SERVICE_NAME",
}
# A model name may be a web address by mistake, with a password or a key in it.
_ADDRESS = re.compile(r"://|:[^/]*@")


class Allowed(str):
    """The text, in a type's annotation, that says which values are allowed."""

    __slots__ = ()


class AllowedAddress(Allowed):
    """The same for an address, which may contain a password by mistake."""

    __slots__ = ()


def _as_model(text: str) -> str:
    """Check that a model is a hub id or a folder, not an address."""
    if not text.strip() or _ADDRESS.search(text):
        raise ValueError("a hub id or a folder")
    return text.strip()


def _as_reranker(text: str) -> str:
    name = _as_model(text)
    return name.lower() if name.lower() in {LATE_INTERACTION, NO_RERANKER} else name


AnyCase = BeforeValidator(lambda text: text.strip().lower() if isinstance(text, str) else text)
AtLeast1 = Field(ge=1)

Auto = Literal["auto"]
Count = Annotated[int, AtLeast1, Allowed("a number, at least 1")]
Tokens = Annotated[int, AtLeast1, Allowed("a number of tokens, at least 1")]
Pairs = Annotated[int, AtLeast1, Allowed("a number of pairs, at least 1")]
Requests = Annotated[int, AtLeast1, Allowed("a number of requests, at least 1")]
Sequences = Annotated[int, AtLeast1, Allowed("a number of texts or pairs, at least 1")]
CacheBytes = Annotated[int, Field(ge=0), Allowed("a number of bytes, or 0 for no cache")]
AutoTokens = Annotated[Auto | Tokens, Allowed("auto, or a number of tokens, at least 1")]
AutoCount = Annotated[Auto | Count, Allowed("auto, or a number, at least 1")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), Allowed("seconds above 0")]
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
    Literal["cls", "last_token", "max", "mean", "mean_sqrt_length", "weighted_mean"], AnyCase
]
# A prompt is tokenized with each text.
MAX_PROMPT_CHARACTERS = 4096
Prompt = Annotated[
    str,
    Field(max_length=MAX_PROMPT_CHARACTERS, strict=True),
    Allowed(
        f"a text of at most {MAX_PROMPT_CHARACTERS:,} characters, in quotes if it ends with a space"
    ),
]
Share = Annotated[
    float, Field(gt=0, le=1, allow_inf_nan=False), Allowed("a number above 0, at most 1")
]
DeviceNames = Annotated[
    str,
    AnyCase,
    Field(pattern=r"^(auto|cpu|mps|cuda|cuda:\d+( *, *cuda:\d+)*|cpu:\d+( *, *cpu:\d+)*)$"),
    Allowed("auto, cpu, mps, cuda, GPUs such as cuda:0,cuda:1, or CPU workers such as cpu:0,cpu:1"),
]
Dtype = Annotated[Literal["auto", "float16", "bfloat16", "float32", "int8", "float8"], AnyCase]
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
    AnyCase,
]


_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@cache
def public_name(model: str) -> str:
    """Return the hub id, or the last part of the path of a local folder.

    `model` is the value of a setting. The path of a folder never leaves the machine.
    """
    # Unlike that of pathlib, this function does not raise without a home folder.
    folder = Path(os.path.expanduser(model))  # noqa: PTH111
    if _HUB_ID.fullmatch(model) and not folder.is_dir():
        return model
    # Absolute, because . and .. are no names. Links are not resolved, to keep their names.
    return re.split(r"[/\\]", os.path.abspath(folder))[-1] or "model"  # noqa: PTH100


_Name = Annotated[str, Field(min_length=1, strict=True)]


class ModelEntry(BaseModel):
    """A model of the MODELS file or of the settings. For None, the setting of that name applies.

    `location` is the file and line for error messages.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: EmbeddingModel
    task: Literal["embed", "rerank", "extract"] = "embed"
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
    kind: Annotated[_Name | None, Allowed("the name of a label or of a template")] = None
    load: Literal["start", "first_use"] = "first_use"
    pinned: Annotated[bool, Field(strict=True)] = False
    location: str = "MODELS"

    @property
    def public_name(self) -> str:
        """The name in responses: the hub id, or the last part of the folder's path."""
        return public_name(self.name)


class DefaultEntries(NamedTuple):
    """The default models, which have their own settings, as entries.

    `dense` is None if `embedder` computes the dense vectors. `reranker` is None if `embedder`
    reranks, or if reranking is off.
    """

    embedder: ModelEntry
    dense: ModelEntry | None
    reranker: ModelEntry | None


class EngineSettings(BaseModel):
    """The settings of an engine; None means that a setting is not set.

    Raises `ValidationError` for an unknown name and for a value that is not allowed. `explain`
    makes a sentence of the error.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,  # An address may contain a password.
        use_attribute_docstrings=True,
        validate_default=True,
    )

    embedding_model: EmbeddingModel = "BAAI/bge-m3"
    """hub id or folder of a text encoder; one of bge-m3's kind makes all three kinds of vectors"""
    dense_embedding_model: DenseModel | None = None
    """another model for dense vectors, such as `Qwen/Qwen3-Embedding-0.6B`"""
    pooling: Pooling | None = None
    """pooling of token states into a dense vector; overrides the model's configuration; not for
    bge-m3's kind"""
    normalize: bool | None = None
    """scale dense vectors to unit length; overrides the model's configuration; not for bge-m3's
    kind"""
    query_prompt: Prompt | None = None
    """prompt of the dense model for `"input_type": "query"`; overrides the model's configuration;
    not for ColBERT models"""
    document_prompt: Prompt | None = None
    """the same for `"input_type": "document"`"""
    reranker_model: RerankerModel = "BAAI/bge-reranker-v2-m3"
    """hub id or folder of a cross-encoder, or of a language model that reranks; or
    `late-interaction`, in which `EMBEDDING_MODEL` scores the passages; or `none`"""
    reranker_kind: str | None = None
    """how to read `RERANKER_MODEL`, if its files do not say: the label that means relevant, or the
    template of a language model: see docs/models.md"""
    model_revision: str | None = None
    """branch, tag or commit of `EMBEDDING_MODEL` on the hub; not set, the newest"""
    dense_model_revision: str | None = None
    """the same for `DENSE_EMBEDDING_MODEL`"""
    reranker_model_revision: str | None = None
    """the same for `RERANKER_MODEL`"""
    models: tuple[ModelEntry, ...] | None = None
    """YAML or TOML file of further models, such as `models.yaml`: see docs/models.md"""
    model_memory_threshold: Share = 0.9
    """share of the memory above which the least recently used models of `MODELS` are unloaded"""
    hf_home: Path = Path("~/.cache/huggingface")
    """folder of downloaded models, which are in `hub` below it"""
    hf_hub_offline: bool = False
    """use only models on the disk; never ask the hub"""

    device: DeviceNames = "auto"
    """`cuda`, `mps`, `cpu`, or several workers behind one queue, such as `cuda:0,cuda:1`, or
    `cpu:0,cpu:1`, which share the cores. `auto` is the first of cuda, mps and cpu that works"""
    dtype: Dtype = "auto"
    """number format; `auto` chooses by device and model. `int8` is for x86 CPUs with AVX2 and, on
    Linux, ARM CPUs with dot products; `float8` for BERT's kind and Qwen3 on NVIDIA Ada, Hopper (the
    only one tested) and Blackwell"""
    attention: Attention = "auto"
    """attention kernel; one that cannot run here stops the start and says what is missing"""
    reproducible: bool = False
    """run texts one by one if batching would change the last bits, as on GPUs and with models run
    by transformers; much slower"""

    bge_embed_max_length: Tokens | None = None
    """token limit of texts for embedding models other than Qwen3; not set, `MAX_INPUT_LENGTH`"""
    max_input_length: Tokens = 8192
    """older name of `BGE_EMBED_MAX_LENGTH`"""
    qwen_embed_max_length: Tokens = 32_768
    """token limit of texts for Qwen3 embedding models"""
    bge_rerank_max_length: Tokens = 8192
    """token limit of query and passage together for cross-encoders"""
    qwen_rerank_max_length: Tokens = 32_768
    """the same for Qwen3-Reranker, with its template; the launcher sets it by the memory"""

    max_batch_tokens: AutoTokens = "auto"
    """token budget of one forward; `auto` measures at the start, and logs its choice as
    `token_budget`. Smaller means sooner answers under load"""
    max_requests_in_batch: Requests | None = None
    """most requests in one forward"""
    max_batch_sequences: Sequences | None = None
    """most texts or pairs in one forward"""
    batch_wait_ms: Milliseconds = 0
    """milliseconds to wait for more requests before a batch is formed"""
    tokenizer_threads: AutoCount = "auto"
    """threads that tokenize; `auto` is one for each CPU, at most eight"""
    qwen_rerank_batch_size: Pairs = 16
    """most pairs in one forward of Qwen3-Reranker; the launcher sets it by the memory"""

    embedding_cache_bytes: CacheBytes = 0
    """most bytes of vectors that a process caches; 0 is off"""

    max_queue_size: Requests = 200
    """embedding requests that may wait; more get 503 after half a second"""
    gpu_process_timeout: Seconds | None = None
    """seconds of one embedding forward (504); not set, 15 on a GPU, 30 on a CPU, or five times the
    predicted time if that is more"""
    rerank_max_queue: Requests = 32
    """rerank requests accepted at once; more get 503 after half a second"""
    rerank_gpu_timeout: RerankSeconds = 60
    """seconds of one rerank request in forwards (504); must be below `REQUEST_TIMEOUT`"""

    @model_validator(mode="after")
    def _agree(self) -> "EngineSettings":
        if self.dtype == "float16" and self.device.startswith("cpu"):
            raise ValueError("DTYPE=float16 is for GPUs; on a CPU use bfloat16 or float32")
        if self.dtype == INT8 and self.device.startswith(("cuda", "mps")):
            raise ValueError(f"DTYPE=int8 is for CPUs; with DEVICE={self.device} use auto")
        if self.dtype == FLOAT8 and self.device.startswith(("cpu", "mps")):
            raise ValueError(f"DTYPE=float8 is for NVIDIA GPUs; with DEVICE={self.device} use auto")
        if self.reranker_kind and self.reranker_model in {LATE_INTERACTION, NO_RERANKER}:
            raise ValueError(
                f"RERANKER_KIND={self.reranker_kind} has no effect with "
                f"RERANKER_MODEL={self.reranker_model}"
            )
        return self

    @property
    def devices(self) -> list[str]:
        """The names of the devices; each has a worker."""
        return list(dict.fromkeys(name.strip() for name in self.device.split(",")))

    @property
    def dense_model(self) -> str:
        """The model that computes the dense vectors."""
        return self.dense_embedding_model or self.embedding_model

    @property
    def default_entries(self) -> DefaultEntries:
        """The default models, which are loaded at startup and never unloaded."""

        def entry(
            name: str, revision: str | None, task: str = "embed", **options: object
        ) -> ModelEntry:
            fixed = {"task": task, "load": "start", "pinned": True}
            return ModelEntry.model_validate(
                {"name": name, "revision": revision or None} | fixed | options
            )

        # These options are for the model of the dense vectors.
        names = ("pooling", "normalize", "query_prompt", "document_prompt")
        options = {name: getattr(self, name) for name in names}
        dense = reranker = None
        if self.dense_model != self.embedding_model:
            dense, options = entry(self.dense_model, self.dense_model_revision, **options), {}
        if self.reranker_model not in {LATE_INTERACTION, NO_RERANKER}:
            reranker = entry(
                self.reranker_model,
                self.reranker_model_revision,
                "rerank",
                kind=self.reranker_kind or None,
            )
        embedder = entry(self.embedding_model, self.model_revision, **options)
        return DefaultEntries(embedder, dense, reranker)

    @property
    def reranker_name(self) -> str:
        """The model that scores passages."""
        if self.reranker_model == LATE_INTERACTION:
            return self.embedding_model
        return self.reranker_model

    @property
    def embed_max_length(self) -> int:
        """The token limit of bge-m3: BGE_EMBED_MAX_LENGTH, else the older MAX_INPUT_LENGTH."""
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


_HIDDEN = "**********"
# An address of only scheme, host and port, which cannot contain a password or a key.
_PLAIN_ADDRESS = re.compile(r"(\w+://)?[\w.-]*(:\w*)?/?")


def explain(error: ValidationError, settings: type[EngineSettings] = EngineSettings) -> str:
    """Return a sentence with the reasons of an error, each reason once."""
    fields = settings.model_fields
    reasons: dict[str, None] = {}
    for item in error.errors():
        reason = item["msg"].removeprefix("Value error, ")
        name = str(item["loc"][0]) if item["loc"] else ""
        if item["type"] == "extra_forbidden":
            reason = f"there is no setting {name}: {advice(name, str.lower, fields)}"
        elif name:
            allowed = allowed_in(fields[name]) or f"see {name.upper()} in .env.example"
            value = shown(str(item["input"]), fields[name])
            reason = f"{name.upper()}={value} is not allowed: {allowed}"
        reasons[reason] = None
    return "; ".join(reasons)


def advice(name: str, write: Callable[[str], str], settings: Collection[str]) -> str:
    """Return advice for `name`, which is none of the `settings`.

    `write` formats the name of a setting like `name`, such as a flag.
    """
    if (variable := name.lstrip("-").replace("-", "_").upper()) in LIBRARY_VARIABLES:
        return f"it is the variable {variable}, in the environment or in .env"
    if (found := other_servers.advice(name, write, settings)) is not None:
        return found
    (nearest,) = get_close_matches(name, map(write, settings), n=1, cutoff=0)
    return f"the nearest is {nearest}"


def allowed_in(field: FieldInfo) -> str:
    """Return the values that a field allows; empty if its declaration does not say."""
    if field.annotation is bool:
        return "true or false"
    if words := choices(field):
        return either(words)
    parts = _parts(field)
    texts = [part for part in parts if isinstance(part, Allowed)]
    # The words of an optional field are nested in its type.
    words_inside = (either(get_args(part)) for part in parts if get_origin(part) is Literal)
    return texts[0] if texts else next(words_inside, "")


def shown(value: str, field: FieldInfo) -> str:
    """Return the value of a field, or asterisks if it may hold a password or a key."""
    parts = _parts(field)
    is_address = "://" in value or any(isinstance(part, AllowedAddress) for part in parts)
    if SecretStr in parts or "@" in value or (is_address and not _PLAIN_ADDRESS.fullmatch(value)):
        return _HIDDEN
    return value


def choices(field: FieldInfo) -> tuple[str, ...]:
    """Return the words that a field allows; empty if it is not limited to fixed words."""
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def either(words: tuple[str, ...] | list[str]) -> str:
    """Return the words as a list in a sentence."""
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _parts(field: FieldInfo) -> list[object]:
    """Return the metadata of a field, its type, and the types and metadata nested in that."""

    def nested(annotation: object) -> Iterator[object]:
        for part in get_args(annotation):
            yield part
            yield from nested(part)

    return [*field.metadata, field.annotation, *nested(field.annotation)]
