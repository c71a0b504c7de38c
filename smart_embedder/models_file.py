"""Read the file of MODELS: further models in YAML or TOML, each with a name and settings.

An error in the file stops the service at startup with a sentence that names the line in YAML, or
the number of the model in TOML. Names and aliases must be unique.
"""

import tomllib
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from smart_embedder.errors import StartupError
from smart_embedder.settings import ModelEntry, allowed_in, shown

_FIELDS = {name: field for name, field in ModelEntry.model_fields.items() if name != "location"}
# The fields that have an effect on models of one task alone.
_TASK_OF = {
    "pooling": "embed",
    "normalize": "embed",
    "query_prompt": "embed",
    "document_prompt": "embed",
    "kind": "rerank",
}
# A field of a model: its name, the location of the name, the location of the value, and the value.
_Field = tuple[str, str, str, Any]


def read_model_entries(path: Path) -> tuple[ModelEntry, ...]:
    """Read the models in a YAML or TOML file; raise a `StartupError` that locates an error."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"MODELS={path} cannot be read: {error}") from error
    read = _read_toml if path.suffix.lower() == ".toml" else _read_yaml
    entries = tuple(_make_entry(location, fields) for location, fields in read(path.name, text))
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
    """Yield the location and the fields of each model."""
    try:
        root = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # The message has the line.
        raise StartupError(f"{file}: {error}") from error
    models = root.get("models")
    if list(root) != ["models"] or not models or not isinstance(models, list):
        raise StartupError(f"{file}: models must be a list of tables [[models]]")
    for number, model in enumerate(models, 1):
        location = f"{file}, model {number}"
        if not isinstance(model, dict):
            raise StartupError(f"{location}: a model is a table [[models]]")
        yield location, [(name, location, location, value) for name, value in model.items()]


def _read_yaml(file: str, text: str) -> Iterator[tuple[str, Iterable[_Field]]]:
    """Yield the location and the fields of each model; each node knows its line in the file."""
    loader, root = _parse_yaml(file, text)
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        raise StartupError(f"{file}, line 1: the file must be a list of models with names")

    def locate(node: yaml.Node) -> str:
        return f"{file}, line {node.start_mark.line + 1}"

    def read_fields(model: yaml.MappingNode) -> Iterator[_Field]:
        for key, node in model.value:
            if not isinstance(key, yaml.ScalarNode):
                raise StartupError(f"{locate(key)}: the name of a field is a word")
            try:
                value = loader.construct_object(node, deep=True)
            except (yaml.YAMLError, ValueError) as error:
                raise StartupError(f"{locate(node)}: this is not a valid YAML value") from error
            yield key.value, locate(key), locate(node), value

    for model in root.value:
        if not isinstance(model, yaml.MappingNode):
            raise StartupError(f"{locate(model)}: a model needs a name, as in `- name: my/model`")
        yield locate(model), read_fields(model)


def _parse_yaml(file: str, text: str) -> tuple[yaml.SafeLoader, yaml.Node | None]:
    """Parse the file; return its root node, and the loader that converts nodes to values."""
    try:
        loader = yaml.SafeLoader(text)
        return loader, loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise StartupError(
            f"{file}, line {line}: there is a character that YAML does not allow"
        ) from error
    except RecursionError as error:
        raise StartupError(f"{file} is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise StartupError(f"{file}, line {mark.line + 1}: {error.problem}") from error


def _make_entry(location: str, fields: Iterable[_Field]) -> ModelEntry:
    """Make the entry of the model at `location` from its fields."""
    values: dict[str, Any] = {}
    locations: dict[str, str] = {}
    for name, name_location, value_location, value in fields:
        if name not in _FIELDS:
            (nearest,) = get_close_matches(name, _FIELDS, n=1, cutoff=0)
            raise StartupError(
                f"{name_location}: a model has no field {name}: the nearest is {nearest}"
            )
        if name in values:
            raise StartupError(f"{name_location}: this model has {name} twice")
        values[name], locations[name] = value, value_location
    try:
        entry = ModelEntry.model_validate({**values, "location": location})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
    else:
        for name in values:
            if _TASK_OF.get(name, entry.task) != entry.task:
                raise StartupError(
                    f"{locations[name]}: {name} has no effect on a model with the task "
                    f"{entry.task}: it is for the task {_TASK_OF[name]}"
                )
        return entry
    if name not in values:
        raise StartupError(f"{location}: this model has no {name}")
    raise StartupError(
        f"{locations[name]}: {name}={shown(str(values[name]), _FIELDS[name])} is not allowed: "
        f"{allowed_in(_FIELDS[name])}"
    )
