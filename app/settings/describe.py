"""What can be told of a setting from its declaration: in --help, in errors and in documents."""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args, get_origin

from pydantic import SecretStr

from app.settings.declaration import SECTIONS
from app.settings.settings import Settings
from app.settings.types import Allowed


def sections() -> dict[str, list[str]]:
    """The names of the settings, in lower case, under the titles of their groups."""
    groups: dict[str, list[str]] = {}
    for name in Settings.model_fields:
        if name in SECTIONS:
            names = groups[SECTIONS[name]] = []
        names.append(name)
    return groups


def default(name: str) -> str:
    """The default as one would write it; empty where the setting is not set."""
    value = Settings.model_fields[name].default
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def meaning(name: str) -> str:
    """What the setting does, in Markdown; the words it may be, if there are few, stand before."""
    told = Settings.model_fields[name].description or ""
    words = choices(name)
    return f"{_either([f'`{word}`' for word in words])}: {told}" if words else told


def without_markup(markdown: str) -> str:
    """The same as plain text."""
    return markdown.replace("`", "")


def choices(name: str) -> tuple[str, ...]:
    """The words that the setting may be; none where it takes anything else."""
    annotation = Settings.model_fields[name].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def allowed(name: str) -> str:
    """What the setting may be."""
    field = Settings.model_fields[name]
    if field.annotation is bool:
        return "true or false"
    if words := choices(name):
        return _either(words)
    told = [*field.metadata, *_parts(field.annotation)]
    texts = (each.text for each in told if isinstance(each, Allowed))
    return next(texts, f"see {name.upper()} in .env.example")


def _either(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _parts(annotation: object) -> Iterator[object]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)
