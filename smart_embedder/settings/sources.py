"""Settings from the command line, the environment and .env, in that order.

A value that is not allowed stops the start with one sentence that names the setting, the value and
the allowed values. So does an unknown name in .env. A wrong value is never replaced by the default;
an empty value counts as not set.
"""

import argparse
import os
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from dotenv import dotenv_values
from pydantic import ValidationError

from smart_embedder.errors import StartupError
from smart_embedder.settings import other_servers
from smart_embedder.settings.declaration import (
    Settings,
    allowed,
    allowed_in,
    default,
    meaning,
    sections,
    shown,
    without_markup,
)
from smart_embedder.settings.types import ModelEntry

DOTENV = Path(".env")
# What --demo stands for: the small model that tools.demo makes there, for everything, and no hub.
_DEMO_FOLDER = "smart-embedder-demo"
_DEMO = {
    "embedding_model": _DEMO_FOLDER,
    "dense_embedding_model": _DEMO_FOLDER,
    "reranker_model": "late-interaction",
    "hf_hub_offline": "true",
}
# In names up to this length more than one difference makes another word, as in HOME and HOST.
_SHORT = 5
# The least similarity: two swapped pairs of letters in the shortest longer name leave more.
_ALIKE = 0.5
_FIELDS = {name: field for name, field in ModelEntry.model_fields.items() if name != "location"}
_ABOUT = """\
Serve embeddings and reranking over HTTP. Where the client's package is installed, too,
`smart-embedder ingest`, `search` and `check` fill a Qdrant collection, ask it and check it; each
has a --help of its own.

Every flag is also a variable of the environment, or a line of .env, in capitals and with
underscores: --max-queue-size is MAX_QUEUE_SIZE. A flag wins over the environment, which wins over
.env. Every user of the machine can read the flags of a process: keep secrets in .env.
"""


class ComposeVariable(NamedTuple):
    """A variable of the compose files, or of compose itself, with its default there."""

    name: str
    default: str
    description: str


COMPOSE_VARIABLES = (
    ComposeVariable(
        "MEMORY_LIMIT",
        "16g",
        "the most memory of the service; above it, its container is ended and started again",
    ),
    ComposeVariable("MONITORING_MEMORY_LIMIT", "1g", "the same for Prometheus and for Grafana"),
    ComposeVariable("QDRANT_MEMORY_LIMIT", "4g", "the same for Qdrant"),
    ComposeVariable("HTTPS_MEMORY_LIMIT", "1g", "the same for the proxy of HTTPS"),
    ComposeVariable("PIDS_LIMIT", "2048", "the most threads of a container"),
    ComposeVariable(
        "STOP_GRACE_PERIOD",
        "40s",
        "how long compose waits before it kills; it must be above `SHUTDOWN_TIMEOUT`",
    ),
    ComposeVariable(
        "HF_CACHE_VOLUME", "smart-embedder-hf-cache", "the volume of downloaded models"
    ),
    ComposeVariable(
        "MODELS_FOLDER",
        "./deploy/models",
        "the folder that is mounted read-only at `/models`: for models that are folders, and for "
        "the file of `MODELS`; in the settings their paths begin with `/models`",
    ),
    ComposeVariable(
        "DOMAIN", "localhost", "the name whose certificate the proxy of the profile `https` fetches"
    ),
    ComposeVariable(
        "HTTPS_NETWORK",
        "192.0.2",
        "the first three numbers of the addresses of that proxy and of the service; a second "
        "project on one machine needs others",
    ),
    ComposeVariable("PROMETHEUS_PORT", "9090", "the port of Prometheus on this machine"),
    ComposeVariable("GRAFANA_PORT", "3000", "the port of Grafana on this machine"),
    ComposeVariable("QDRANT_PORT", "6333", "the port of Qdrant's REST API on this machine"),
    ComposeVariable("QDRANT_GRPC_PORT", "6334", "the port of Qdrant's gRPC API on this machine"),
    ComposeVariable("QDRANT__SERVICE__API_KEY", "", "the key that Qdrant asks its clients for"),
    ComposeVariable("COMPOSE_FILE", "", "the same as compose's flag -f"),
    ComposeVariable("COMPOSE_PROFILES", "", "the same as compose's flag --profile"),
    ComposeVariable("COMPOSE_PROJECT_NAME", "smart-embedder", "the same as compose's flag -p"),
)
# Settings of earlier versions, and where each went.
REMOVED = {
    "EMBEDDING_CACHE": "EMBEDDING_CACHE_BYTES above 0 switches the cache on, one for each process",
    "MAX_ANSWER_BYTES": "an answer may hold 36 MiB, and 10 bytes for each byte of its body",
    "RATE_LIMIT_STORE": "each process counts by itself; a gateway can limit several together",
    "REPLAY_LOG": "requests are not recorded any more: `tools.verify --space` compares two servers",
    "REPLAY_LOG_BYTES": "requests are not recorded any more",
    "STATE_DIR": "a start compares no vectors: `tools.verify --space` does, as a job or in CI",
}
_SETTINGS = {name.upper() for name in Settings.model_fields}
_KNOWN = _SETTINGS | {variable.name for variable in COMPOSE_VARIABLES}


def load_settings(arguments: Sequence[str] = ()) -> Settings:
    """Read the settings; raise `StartupError` naming all that is wrong with them.

    `arguments` are those of the command line, of which `--help` prints the flags and ends the
    process.
    """
    flags = parse_flags(arguments)
    values: dict[str, Any] = _settings_in(_read_dotenv()) | _settings_in(os.environ) | flags
    if "models" in values:
        values["models"] = read_model_entries(Path(values["models"]))
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise StartupError(explain(error)) from None


def explain(error: ValidationError) -> str:
    """What is wrong with the values of settings, each once."""
    reasons: dict[str, None] = {}
    for item in error.errors():
        reason = item["msg"].removeprefix("Value error, ")
        name = str(item["loc"][0]) if item["loc"] else ""
        if item["type"] == "extra_forbidden":
            reason = (
                f"there is no setting {name}: {_advice(name, str.lower, Settings.model_fields)}"
            )
        elif name:
            value = shown(name.upper(), str(item["input"]))
            reason = f"{name.upper()}={value} is not allowed: {allowed(name)}"
        reasons[reason] = None
    return "; ".join(reasons)


def _settings_in(variables: Mapping[str, str | None]) -> dict[str, str]:
    """The settings among variables, whose names may be in any case; empty ones are left out."""
    found = {name.lower(): value for name, value in variables.items() if value}
    return {name: value for name, value in found.items() if name in Settings.model_fields}


def parse_flags(arguments: Sequence[str]) -> dict[str, str]:
    """The settings that are given as flags, by name in lower case; empty ones count as not set.

    Raises `StartupError` for an unknown flag; `--help` prints all flags and ends the process.
    """
    known, unknown = _parser().parse_known_args(arguments)
    if not unknown:
        flags = vars(known)
        demo = _DEMO if flags.pop("demo", False) else {}
        return demo | {name: value for name, value in flags.items() if value}
    flag = unknown[0].partition("=")[0]
    if (name := flag.removeprefix("--").replace("-", "_").upper()) in REMOVED:
        raise StartupError(f"there is no flag {removed_setting(name)}")
    if not flag.startswith("-"):
        raise StartupError("flags begin with --, and one of the arguments belongs to none")
    found = _advice("--" + flag.lstrip("-"), _flag, map(_flag, Settings.model_fields))
    raise StartupError(f"there is no flag {flag}: {found}; --help lists all")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _advice(name: str, write: Callable[[str], str], known: Iterable[str]) -> str:
    """What to use in place of `name`, which is none of the `known` names.

    `write` writes the name of a setting as they are written.
    """
    if (found := other_servers.advice(name, write)) is not None:
        return found
    (nearest,) = get_close_matches(name, known, n=1, cutoff=0)
    return f"the nearest is {nearest}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m smart_embedder",
        usage="python -m smart_embedder [--SETTING VALUE ...]",
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
        """Raise the message alone: argparse would print a usage of fifty flags."""
        raise StartupError(message)


def _read_dotenv() -> dict[str, str | None]:
    """The variables in .env; raises `StartupError` if it cannot be read or has unknown names."""
    if not DOTENV.is_file():
        return {}
    try:
        variables = dotenv_values(DOTENV, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{DOTENV} cannot be read: {error}") from error
    wrong = []
    for name in variables:
        if name.upper() in REMOVED:
            wrong.append(f".env sets {removed_setting(name)}")
        elif name.upper() not in _KNOWN:
            found = _advice(name.upper(), str.upper, sorted(_KNOWN))
            wrong.append(f".env sets {name}, which is no setting: {found}")
    if wrong:
        raise StartupError("; ".join(wrong))
    return variables


def removed_setting(name: str) -> str:
    """The sentence about a setting that is gone."""
    return f"{name}, which is gone: {REMOVED[name.upper()]}"


def unknown_names(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Names in the environment that look like settings and are none, with what they stand for.

    They are another server's, or differ from a setting by a letter or two.
    """
    for name in sorted(environment):
        upper = name.upper()
        if (ours := other_servers.settings_for(upper)) is not None:
            yield name, ours
            continue
        near = [setting for setting in _SETTINGS - {upper} if _has_the_letters(upper, setting)]
        if upper not in _KNOWN and (found := get_close_matches(upper, near, cutoff=_ALIKE)):
            yield name, found[0]


def _has_the_letters(name: str, setting: str) -> bool:
    """Whether all letters but one or two are the same, in any order."""
    most = 1 if len(setting) <= _SHORT else 2
    if abs(len(name) - len(setting)) > most:
        return False
    letters, wanted = Counter(name), Counter(setting)
    return max((letters - wanted).total(), (wanted - letters).total()) <= most


# A field of a model: its name, where that stands, where its value does, and the value.
_Field = tuple[str, str, str, Any]


def read_model_entries(path: Path) -> tuple[ModelEntry, ...]:
    """The models in a YAML or TOML file; raises a `StartupError` that tells where an error is."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"MODELS={path} cannot be read: {error}") from error
    read = _read_toml if path.suffix.lower() == ".toml" else _read_yaml
    entries = tuple(_entry(location, fields) for location, fields in read(path.name, text))
    owners: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in (entry.public_name, *entry.aliases):
            other = owners.setdefault(name.casefold(), entry)
            if other is not entry:
                raise StartupError(
                    f"{entry.location}: {name} is a name of the model of {other.location}, too"
                )
    return entries


def _read_toml(file: str, text: str) -> Iterator[tuple[str, Iterable[_Field]]]:
    """The location and the fields of each model."""
    try:
        root = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Its message has the line.
        raise StartupError(f"{file}: {error}") from error
    models = root.get("models")
    if list(root) != ["models"] or not models or not isinstance(models, list):
        raise StartupError(f"{file}: this is no list of models, each a table [[models]]")
    for number, model in enumerate(models, 1):
        location = f"{file}, model {number}"
        if not isinstance(model, dict):
            raise StartupError(f"{location}: a model is a table [[models]]")
        yield location, [(name, location, location, value) for name, value in model.items()]


def _read_yaml(file: str, text: str) -> Iterator[tuple[str, Iterable[_Field]]]:
    """As `_read_toml`; each node knows its line in the file."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise StartupError(
            f"{file}, line {line}: there is a character that YAML does not allow"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise StartupError(f"{file}, line {mark.line + 1}: {error.problem}") from error
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        raise StartupError(f"{file}, line 1: this is no list of models, of which each has a name")

    def place(node: yaml.Node) -> str:
        return f"{file}, line {node.start_mark.line + 1}"

    def fields_of(model: yaml.MappingNode) -> Iterator[_Field]:
        for key, node in model.value:
            try:
                value = loader.construct_object(node, deep=True)
            except (yaml.YAMLError, ValueError) as error:
                raise StartupError(f"{place(node)}: YAML knows no such value") from error
            yield str(key.value), place(key), place(node), value

    for model in root.value:
        if not isinstance(model, yaml.MappingNode):
            raise StartupError(f"{place(model)}: a model needs a name, as in `- name: my/model`")
        yield place(model), fields_of(model)


def _entry(location: str, fields: Iterable[_Field]) -> ModelEntry:
    """The model at `location` with these fields."""
    values: dict[str, Any] = {}
    locations: dict[str, str] = {}
    for name, of_name, of_value, value in fields:
        if name not in _FIELDS:
            (nearest,) = get_close_matches(name, _FIELDS, n=1, cutoff=0)
            raise StartupError(
                f"{of_name}: {name} is nothing that a model has: the nearest is {nearest}"
            )
        if name in values:
            raise StartupError(f"{of_name}: {name} is there twice for this model")
        values[name], locations[name] = value, of_value
    try:
        return ModelEntry.model_validate({**values, "location": location})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
    if name not in values:
        raise StartupError(f"{location}: this model has no {name}")
    raise StartupError(
        f"{locations[name]}: {name}={shown(name, str(values[name]))} is not allowed: "
        f"{allowed_in(_FIELDS[name])}"
    )
