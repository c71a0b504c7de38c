"""Reads the JSON files of a model: numbers, modules, poolings, prompts, options for texts.

These are `config.json` and the files of sentence-transformers. Invalid and unsupported values raise
`StartupError`. Heads and rerankers decide what they do with the values.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smart_embedder.errors import StartupError
from smart_embedder.models.files.reading import read_file
from smart_embedder.models.files.record import current_record

# A member of a demo model's config.json: a note for those who serve it.
DEMO_KEY = "smart_embedder_demo"
# An upper bound of every size of a model, and of its number of positions.
_LARGEST = 2**31
# Packages whose classes modules.json may name; none is imported.
_PACKAGES = ("sentence_transformers", "pylate")
# Classes of checkpoints that are computed here, instead of their code.
_KNOWN_CLASSES = {"st_quantize.FlexibleQuantizer"}
# pplx-embed is a Qwen3 whose own code changes only the direction of its attention.
PPLX = ["PPLXQwen3Model"]
_PPLX_CONFIG = {"model_type": "qwen3", "use_bidirectional_attention": True}
# Older names of modules.
_SAME_CLASSES = {"CLIPModel": "Transformer"}
# Values of `pooling_mode`, since version 5.4 of sentence-transformers, by our names.
POOLINGS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "weightedmean": "weighted_mean",
    "lasttoken": "last_token",
}
# Flags of older versions, in the order of `POOLINGS`.
_OLD_FLAGS = (
    "cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens",
    "lasttoken",
)  # fmt: skip
# Older versions named the file by the family; the first that exists counts.
_TEXT_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
# Arguments for tokenizers, configurations and models of transformers, by older and newer names.
_UNREAD_OPTIONS = (
    "processing_kwargs", "processor_kwargs", "tokenizer_args", "config_kwargs", "config_args",
    "model_kwargs", "model_args",
)  # fmt: skip
# Arguments without effect on the vectors, or which settings choose.
_HARMLESS = {
    "add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage",
    "padding_side", "torch_dtype", "trust_remote_code", "use_fast", "use_safetensors",
}  # fmt: skip
# The names of sentence-transformers for the task of a transformer, and for its result.
STATES = ("feature-extraction", "last_hidden_state")
FEATURES = ("feature-extraction", "pooler_output")
MASKED_LANGUAGE, CLASSES = ("fill-mask", "logits"), ("sequence-classification", "logits")
LANGUAGE = ("text-generation", "logits")
TOKEN_CLASSES = ("token-classification", "logits")
# Arguments of transformers for rendering, which are no variables of a chat template.
_RENDERING = {
    "chat_template", "continue_final_message", "documents", "max_length", "padding",
    "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tools",
    "truncation",
}  # fmt: skip
# An argument of sentence-transformers, for texts that are cut: here templates never are.
_RESTORE_SUFFIX = "restore_suffix"
# Options that only ColBERT models have.
_OPTIONS_BY_TYPE = ("query_length", "document_length", "query_expansion")
POOLING_FOLDER = "1_Pooling"
TRANSFORMERS = ("Transformer", "MLMTransformer")
# Modules that choose other modules by the task of a text.
_ROUTERS = ("Router", "Asym")
# Families that project texts and pictures into one space.
IMAGE_TEXT_TYPES = {
    "aimv2", "altclip", "blip", "chinese_clip", "clip", "clipseg", "groupvit", "metaclip_2",
    "owlv2", "owlvit", "siglip", "siglip2",
}  # fmt: skip
# The classes of families with a vector for each token of a text, or of the picture of a page.
PAGE_TYPES = {
    "colmodernvbert": "ColModernVBertForRetrieval",
    "colpali": "ColPaliForRetrieval",
    "colqwen2": "ColQwen2ForRetrieval",
}
# Families that read texts and pictures as messages of a chat.
_MESSAGE_TYPES = {"embedding_gemma2", "qwen3_vl"}
_WITH_TOKENIZER = (*TRANSFORMERS, "StaticEmbedding")
_SENTENCE_CONFIG = "config_sentence_transformers.json"
# A tokenizer's configuration states no limit as a much larger number.
_NO_LIMIT = 1_000_000_000


def read_config(folder: Path) -> dict[str, Any]:
    """Read the model's `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise StartupError(f"{folder} is not a model: it holds no config.json")
    return read_optional(path)


def read_optional(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if there is no such file."""
    config = _read_json(path) if path.is_file() else {}
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object")
    if path.name != "config.json":
        return config
    _require_named_class(path, config)
    if config.get("architectures") == PPLX:
        config |= _PPLX_CONFIG
    record = current_record()
    return record.watch(path, config) if record else config


def _require_named_class(path: Path, config: dict[str, Any]) -> None:
    """Raise `StartupError` unless the names that decide the model's class are names."""
    names, model_type = config.get("architectures"), config.get("model_type")
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if names is not None and not is_list:
        raise unusable_value(path.parent, "architectures", names)
    if not isinstance(model_type, str | None):
        raise unusable_value(path.parent, "model_type", model_type)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise StartupError(f"{path} cannot be read: it is nested too deeply") from error


def name_labels(config: dict[str, Any], count: int) -> tuple[str, ...]:
    """Return the names of a classifier's labels; those without a name are called as usual."""
    names: Any = config.get("id2label")
    names = names if isinstance(names, dict) else {}
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))


def read_integer(
    folder: Path, config: dict[str, Any], key: str, default: int | None = None, *, least: int = 1
) -> int:
    """Read the integer under `key`; raises `StartupError` for any other value or range."""
    value = config.get(key, default)
    if type(value) is not int or not least <= value <= _LARGEST:
        raise unusable_value(folder, key, value)
    return value


def read_number(folder: Path, config: dict[str, Any], key: str, default: float) -> float:
    """Read the positive number under `key`; raises `StartupError` for any other value."""
    value = config.get(key, default)
    if type(value) not in {int, float} or not 0 < value <= _LARGEST:
        raise unusable_value(folder, key, value)
    return float(value)


def unusable_value(folder: Path, key: str, value: Any, file: str = "config.json") -> StartupError:
    """Return the error for a value that cannot be used."""
    return StartupError(f"{folder / file} has no usable {key}: {value!s:.60}")


@dataclass(frozen=True, slots=True)
class Module:
    """A module of sentence-transformers: its class, without the package, and its folder."""

    kind: str
    folder: Path


def read_modules(folder: Path) -> list[Module]:
    """Read the modules that documents pass: all, unless the model has a `Router`.

    Raises `StartupError` if modules.json is malformed or names unknown code.
    """
    return _read_routes(folder)["document"]


def read_query_module(folder: Path) -> Module | None:
    """Read the `SparseStaticEmbedding` of queries, if the model has a `Router`."""
    return next(iter(_read_routes(folder).get("query", ())), None)


def _find_module(path: Path, kind: str, name: str) -> Module:
    """Return the module of a class in a folder that the file in `path` names."""
    folder = path.parent
    if kind.partition(".")[0] not in _PACKAGES and kind not in _KNOWN_CLASSES:
        raise StartupError(f"{path} names {kind}: code of a checkpoint is never run")
    if "\0" in name or not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise StartupError(f"{path} names a folder outside the model: {name!r:.200}")
    name_of_class = kind.rpartition(".")[2]
    return Module(_SAME_CLASSES.get(name_of_class, name_of_class), folder / name)


def _read_routes(folder: Path) -> dict[str, list[Module]]:
    """Read the modules for queries and for documents, which pass all where no `Router` is first.

    Raises `StartupError` unless queries have a `SparseStaticEmbedding`, and documents, which are
    the default, a `SpladePooling`.
    """
    path = folder / "modules.json"
    entries = _read_json(path) if path.is_file() else []
    if not isinstance(entries, list):
        raise StartupError(f"{path} is not a list of modules")
    modules: list[Module] = []
    for entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(kind, str):
            raise StartupError(f"{path} has a module without a type")
        modules.append(_find_module(path, kind, str(entry.get("path") or "")))
    if not any(module.kind in _ROUTERS for module in modules):
        return {"document": modules}
    router, *behind = modules
    files = (router.folder / name for name in ("router_config.json", "config.json"))
    file = next(filter(Path.is_file, files), router.folder / "router_config.json")
    config = read_optional(file)
    try:
        routes = {
            task: [_find_module(file, config["types"][name], name) for name in names]
            for task, names in config["structure"].items()
        }
    except (AttributeError, LookupError, TypeError) as error:
        raise StartupError(f"{file} has no types and structure of routes") from error
    kinds = {task: [module.kind for module in route] for task, route in routes.items()}
    parameters = config.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    is_supported = (
        kinds.keys() == {"query", "document"}
        and kinds["query"] == ["SparseStaticEmbedding"]
        and "SpladePooling" in kinds["document"]
        and parameters.get("default_route", "document") == "document"
        and not parameters.get("route_mappings")
    )
    if behind or not is_supported:
        shown = "; ".join(f"{task}: {', '.join(route)}" for task, route in kinds.items())
        raise StartupError(
            f"{file} routes texts by their task ({shown}); supported: SparseStaticEmbedding for "
            "queries, and for documents, the default, a transformer and SpladePooling"
        )
    return routes


def transformer_folder(folder: Path) -> Path:
    """Return the folder of the transformer, or table, and its tokenizer: some have their own."""
    found = (module.folder for module in read_modules(folder) if module.kind in _WITH_TOKENIZER)
    return next(found, folder)


def read_transformer_config(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of the model's transformer; empty if it has none."""
    return read_optional(transformer_folder(folder) / "config.json")


def reads_image_messages(folder: Path) -> bool:
    """Return whether the files of a transformer say that it reads pictures as messages, and how."""
    config = read_optional(folder / "config.json")
    modalities = read_text_config(folder).get("modality_config")
    return (
        config.get("model_type") in _MESSAGE_TYPES
        and config.get("vision_config") is not None
        and isinstance(modalities, dict)
        and {"image", "message"} <= modalities.keys()
        and (
            (folder / "preprocessor_config.json").is_file()
            or "image_processor" in read_optional(folder / "processor_config.json")
        )
    )


def read_architecture(folder: Path) -> str:
    """Read the name of the class that the transformer was saved from; empty if there is none."""
    named = read_transformer_config(folder).get("architectures") or [""]
    return str(named[0])


def is_classifier(folder: Path) -> bool:
    """Return whether the architecture of the model is one for sequence classification."""
    return read_architecture(folder).endswith("ForSequenceClassification")


def require_known_modules(folder: Path, *kinds: str) -> None:
    """Raise `StartupError` for a module of another kind, which would be ignored."""
    for module in read_modules(folder):
        if module.kind not in kinds:
            raise StartupError(
                f"{folder / 'modules.json'} names the module {module.kind}; supported: "
                f"{', '.join(kinds)}"
            )


def has_module(folder: Path, kind: str) -> bool:
    """Return whether the model has a module of this class."""
    return any(module.kind == kind for module in read_modules(folder))


def has_modules(folder: Path) -> bool:
    """Return whether the folder has modules of sentence-transformers."""
    return (folder / "modules.json").is_file() or (folder / POOLING_FOLDER).is_dir()


def read_poolings(folder: Path) -> tuple[str, ...]:
    """Read the poolings of a module; the vectors of several are concatenated."""
    config, path = read_config(folder), folder / "config.json"
    if config.get("include_prompt", True) is not True:
        raise StartupError(f"{path} leaves the prompt out of the pooling, which is not supported")
    named = config.get("pooling_mode")
    if named is None:
        flags = zip(_OLD_FLAGS, POOLINGS.values(), strict=True)
        found = [name for flag, name in flags if config.get(f"pooling_mode_{flag}")] or ["mean"]
    else:
        names = named if isinstance(named, list) else [named]
        found = [POOLINGS.get(str(name), "") for name in names]
    if not all(found):
        raise StartupError(f"{path} names no supported pooling: {', '.join(POOLINGS)}")
    return tuple(found)


def read_pooling(folder: Path) -> str:
    """Read the pooling of a model of bge-m3's kind, `cls` (the default) or `mean`."""
    path = folder / POOLING_FOLDER
    if not (path / "config.json").is_file():
        return "cls"
    poolings = read_poolings(path)
    if poolings not in {("cls",), ("mean",)}:
        raise StartupError(
            f"{path / 'config.json'} names a pooling that is not supported for models of bge-m3's "
            "kind: use cls or mean"
        )
    return poolings[0]


def read_prompts(folder: Path) -> dict[str, str]:
    """Read sentence-transformers' prompts by name; empty if all prompts are empty."""
    path = folder / _SENTENCE_CONFIG
    prompts = read_optional(path).get("prompts") or {}
    is_usable = isinstance(prompts, dict) and all(
        isinstance(prompt, str) for prompt in prompts.values()
    )
    if not is_usable:
        raise StartupError(f"{path} has no usable prompts: each is a string under its name")
    return prompts if any(prompts.values()) else {}


def read_default_prompt(folder: Path) -> str:
    """Read the prompt that `default_prompt_name` names; empty if it names none."""
    path = folder / _SENTENCE_CONFIG
    config = read_optional(path)
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise StartupError(f"{path} has no prompt with its default_prompt_name: {name}")
    return "" if name is None else str(prompts[name])


def read_similarity(folder: Path) -> str:
    """Read how the vectors of two texts are compared: by their cosine, if nothing else is named."""
    return str(read_optional(folder / _SENTENCE_CONFIG).get("similarity_fn_name") or "cosine")


def read_vector_limit(folder: Path, name: str) -> int | None:
    """Read a limit of vectors, such as `truncate_dim`; None if it is not set."""
    path = folder / _SENTENCE_CONFIG
    value = read_optional(path).get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise StartupError(f"{path} has no usable {name}: {value}")
    return value


@dataclass(frozen=True, slots=True)
class SentenceOverrides:
    """Settings that override a model's configuration; None leaves it as it is."""

    pooling: str | None = None
    normalize: bool | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None

    @property
    def prompts(self) -> dict[str, str]:
        """The prompts that are set, by their names in a configuration."""
        named = {"query": self.query_prompt, "document": self.document_prompt}
        return {name: prompt for name, prompt in named.items() if prompt is not None}

    def refuse(self, *settings: str, for_model: str) -> None:
        """Raise `StartupError` if one of these is set, which has no effect on such a model."""
        for setting in settings:
            value = getattr(self, setting)
            if value is not None:
                shown = str(value).lower() if isinstance(value, bool) else value
                raise StartupError(f"{setting.upper()}={shown} has no effect on {for_model}")


NO_OVERRIDES = SentenceOverrides()


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a model reads texts, by the configuration of sentence-transformers.

    Texts are cut to `max_length` tokens, if it is set, and converted to lower case with
    `lower_case`. With a `message_format` they are messages of a chat template, which gets the
    variables `template_options`.
    """

    max_length: int | None = None
    lower_case: bool = False
    message_format: str | None = None
    template_options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def read(
        cls, folder: Path, task: tuple[str, str] = STATES, *, by_type: bool = False
    ) -> "TextOptions":
        """Read the options; a tokenizer's limit is the default of `max_length`.

        With `by_type`, queries and documents may have options of their own, which the caller reads.
        Raises `StartupError` for unsupported options that would change tokens, and for a model of
        another task than `task`.
        """
        texts = read_text_config(folder)
        model_type = read_optional(folder / "config.json").get("model_type")
        if model_type in IMAGE_TEXT_TYPES:
            task = FEATURES
        message_format = _require_task(folder, texts, *task)
        template_options = None if message_format is None else _read_template_options(texts)
        if template_options is not None:
            texts["processing_kwargs"] = None
        unread = []
        for name in _UNREAD_OPTIONS:
            options = texts.get(name) or {}
            if not isinstance(options, dict) or options.keys() - _HARMLESS:
                unread.append(name)
        if not by_type:
            unread += [name for name in _OPTIONS_BY_TYPE if texts.get(name) is not None]
        if unread:
            raise StartupError(
                f"{folder} has {unread[0]} for its texts, which is not applied to this model"
            )
        length = texts.get("max_seq_length")
        if not length:
            length = read_optional(folder / "tokenizer_config.json").get("model_max_length")
        is_limit = type(length) is int and 0 < length < _NO_LIMIT
        return cls(
            max_length=length if is_limit else None,
            lower_case=bool(texts.get("do_lower_case")),
            message_format=message_format,
            template_options=template_options or (),
        )


def _read_template_options(texts: dict[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """Read the variables for a chat template; None if there are other options, too."""
    options = texts.get("processing_kwargs") or {}
    variables: Any = options.get("chat_template", {}) if isinstance(options, dict) else None
    is_usable = (
        isinstance(variables, dict)
        and options.keys() <= {"chat_template"}
        and variables.keys().isdisjoint(_RENDERING)
        and all(isinstance(value, str | int | None) for value in variables.values())
    )
    if not is_usable:
        return None
    return tuple(sorted((name, variables[name]) for name in variables.keys() - {_RESTORE_SUFFIX}))


def _require_task(folder: Path, texts: dict[str, Any], task: str, result: str) -> str | None:
    """Return the format of messages as which texts are read, or None if they are read as they are.

    Raises `StartupError` if another task, or another result of it, is configured.
    """
    modalities = texts.get("modality_config")
    modalities = modalities if isinstance(modalities, dict) else {}
    # sentence-transformers converts a text to a message wherever it may.
    read_as = "message" if "message" in modalities else "text"
    text_options = modalities.get(read_as)
    text_options = text_options if isinstance(text_options, dict) else {}
    method = "get_text_features" if result == FEATURES[1] else "forward"
    for configured, supported in (
        (texts.get("transformer_task"), task),
        (text_options.get("method"), method),
        (text_options.get("method_output_name"), result),
    ):
        if configured is not None and configured != supported:
            raise StartupError(
                f"{folder} makes {configured!s:.60} of texts (transformer_task or "
                f"modality_config), which is not supported: {supported} is"
            )
    return str(text_options.get("format", "auto")) if read_as == "message" else None


def read_text_config(folder: Path) -> dict[str, Any]:
    """Read `sentence_bert_config.json`, or the file of older versions with the family's name."""
    configs = (
        read_optional(folder / f"sentence_{family}_config.json") for family in _TEXT_FAMILIES
    )
    return next(filter(None, configs), {})
