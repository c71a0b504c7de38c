"""Reads `modules.json`: the modules of a sentence-transformers model, in their order."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import StartupError
from app.models.checkpoint.config import read_json

# The packages of known classes, none of which is imported.
_PACKAGES = ("sentence_transformers", "pylate")


@dataclass(frozen=True, slots=True)
class Module:
    """The class that an entry names, without its package, and the folder of its files."""

    kind: str
    folder: Path


def read_modules(folder: Path) -> list[Module]:
    """All modules; none where there is no `modules.json`.

    Raises `StartupError` for a malformed file, and for classes in the checkpoint's own code.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return []
    entries = read_json(path)
    if not isinstance(entries, list):
        raise StartupError(f"{path} is not a list of modules")
    return list(_modules(folder, entries))


def require_known_modules(folder: Path, *kinds: str) -> None:
    """Raise `StartupError` for a module of another kind, which would not be computed."""
    other = next((each.kind for each in read_modules(folder) if each.kind not in kinds), None)
    if other is not None:
        raise StartupError(
            f"{folder / 'modules.json'} names the module {other}; known here: {', '.join(kinds)}"
        )


def _modules(folder: Path, entries: list[Any]) -> Iterator[Module]:
    path = folder / "modules.json"
    for entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(kind, str):
            raise StartupError(f"{path} has a module without a type")
        if kind.partition(".")[0] not in _PACKAGES:
            raise StartupError(f"{path} names {kind}: code of a checkpoint is never run")
        name = str(entry.get("path") or "")
        if "\0" in name or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise StartupError(f"{path} names a folder outside the model: {name!r:.200}")
        yield Module(kind.rpartition(".")[2], folder / name)
