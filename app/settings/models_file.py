"""Reads the file that MODELS names; errors tell the line."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from app.errors import StartupError
from app.settings.describe import allowed_in, shown
from app.settings.model_entry import ModelEntry

_FIELDS = {name: field for name, field in ModelEntry.model_fields.items() if name != "place"}


def read_model_entries(path: Path) -> tuple[ModelEntry, ...]:
    """The models in a YAML file; raises a `StartupError` that names the line of an error."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"MODELS={path} cannot be read: {error}") from error
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
    entries = tuple(_Reader(path.name, loader).entry(node) for node in root.value)
    _require_own_names(entries)
    return entries


class _Reader:
    """Makes entries of YAML nodes, which know their lines."""

    def __init__(self, file: str, loader: yaml.SafeLoader) -> None:
        self._file = file
        self._loader = loader

    def entry(self, node: yaml.Node) -> ModelEntry:
        """One model."""
        if not isinstance(node, yaml.MappingNode):
            raise StartupError(
                f"{self._place(node)}: a model needs a name, as in `- name: my/model`"
            )
        values: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = str(key.value)
            if name not in _FIELDS:
                raise StartupError(f"{self._place(key)}: {_unknown(name)}")
            if name in values:
                raise StartupError(f"{self._place(key)}: {name} is there twice for this model")
            values[name] = value
        return self._validated(node, values)

    def _validated(self, node: yaml.Node, nodes: dict[str, yaml.Node]) -> ModelEntry:
        values = {name: self._value(value) for name, value in nodes.items()}
        try:
            return ModelEntry.model_validate(values | {"place": self._place(node)})
        except ValidationError as error:
            name = str(error.errors()[0]["loc"][0])
        if name not in nodes:
            raise StartupError(f"{self._place(node)}: this model has no {name}")
        raise StartupError(
            f"{self._place(nodes[name])}: {name}={shown(name, str(values[name]))} is not allowed: "
            f"{allowed_in(_FIELDS[name])}"
        )

    def _value(self, node: yaml.Node) -> Any:
        try:
            return self._loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            raise StartupError(f"{self._place(node)}: YAML knows no such value") from error

    def _place(self, node: yaml.Node) -> str:
        return f"{self._file}, line {node.start_mark.line + 1}"


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
                    f"{entry.place}: {name} is a name of the model of {other.place}, too"
                )
