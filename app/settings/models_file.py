"""Reads the file that MODELS names; errors tell the line, or in TOML which model it is."""

import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from app.errors import StartupError
from app.settings.describe import allowed_in, shown
from app.settings.model_entry import ModelEntry

_FIELDS = {name: field for name, field in ModelEntry.model_fields.items() if name != "location"}


def read_model_entries(path: Path) -> tuple[ModelEntry, ...]:
    """The models in a YAML or TOML file; raises a `StartupError` that tells where an error is."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"MODELS={path} cannot be read: {error}") from error
    read = _read_toml if path.suffix.lower() == ".toml" else _read_yaml
    entries = read(path, text)
    _require_own_names(entries)
    return entries


def _read_toml(path: Path, text: str) -> tuple[ModelEntry, ...]:
    try:
        root = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # Its message has the line.
        raise StartupError(f"{path.name}: {error}") from error
    models = root.get("models")
    if list(root) != ["models"] or not models or not isinstance(models, list):
        raise StartupError(f"{path.name}: this is no list of models, each a table [[models]]")
    return tuple(
        _toml_entry(model, f"{path.name}, model {number}") for number, model in enumerate(models, 1)
    )


def _toml_entry(model: object, location: str) -> ModelEntry:
    if not isinstance(model, dict):
        raise StartupError(f"{location}: a model is a table [[models]]")
    for name in model:
        if name not in _FIELDS:
            raise StartupError(f"{location}: {_unknown(name)}")
    return _validated(model, location, lambda _: location)


def _read_yaml(path: Path, text: str) -> tuple[ModelEntry, ...]:
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise StartupError(
            f"{path.name}, line {line}: there is a character that YAML does not allow"
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise StartupError(f"{path.name}, line {mark.line + 1}: {error.problem}") from error
    if not isinstance(root, yaml.SequenceNode) or not root.value:
        raise StartupError(
            f"{path.name}, line 1: this is no list of models, of which each has a name"
        )
    return tuple(_Reader(path.name, loader).entry(node) for node in root.value)


class _Reader:
    """Makes entries of YAML nodes, which know their lines."""

    def __init__(self, file: str, loader: yaml.SafeLoader) -> None:
        self._file = file
        self._loader = loader

    def entry(self, node: yaml.Node) -> ModelEntry:
        """One model."""
        if not isinstance(node, yaml.MappingNode):
            raise StartupError(
                f"{self._location(node)}: a model needs a name, as in `- name: my/model`"
            )
        values: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if name not in _FIELDS:
                raise StartupError(f"{self._location(key)}: {_unknown(name)}")
            if name in values:
                raise StartupError(f"{self._location(key)}: {name} is there twice for this model")
            values[name] = value
        fields = {name: self._value(value) for name, value in values.items()}
        return _validated(fields, self._location(node), lambda name: self._location(values[name]))

    def _value(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            raise StartupError(f"{self._location(node)}: YAML knows no such value") from error

    def _location(self, node: yaml.Node) -> str:
        return f"{self._file}, line {node.start_mark.line + 1}"


def _validated(
    values: Mapping[str, Any], location: str, location_of: Callable[[str], str]
) -> ModelEntry:
    """The model with these fields, at `location`; `location_of` tells where a field is."""
    try:
        return ModelEntry.model_validate({**values, "location": location})
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
    if name not in values:
        raise StartupError(f"{location}: this model has no {name}")
    raise StartupError(
        f"{location_of(name)}: {name}={shown(name, str(values[name]))} is not allowed: "
        f"{allowed_in(_FIELDS[name])}"
    )


def _unknown(name: str) -> str:
    (nearest,) = get_close_matches(name, _FIELDS, n=1, cutoff=0)
    return f"{name} is nothing that a model has: the nearest is {nearest}"


def _require_own_names(entries: tuple[ModelEntry, ...]) -> None:
    """Raise `StartupError` where two models have a name in common."""
    owners: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in (entry.public_name, *entry.aliases):
            other = owners.setdefault(name.casefold(), entry)
            if other is not entry:
                raise StartupError(
                    f"{entry.location}: {name} is a name of the model of {other.location}, too"
                )
