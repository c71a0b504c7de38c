"""Texts about a setting from its declaration, for --help, errors and documents."""

import re
from collections.abc import Iterator, Sequence
from typing import Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from app.settings.declaration import SECTIONS
from app.settings.settings import Settings
from app.settings.types import Allowed

_SECRETS = {
    *("API_TOKEN", "EMBEDDING_CACHE", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "RATE_LIMIT_STORE"),
}
_HIDDEN = "**********"
# An address of scheme, host and port, which can hold no password and no key.
_PLAIN_ADDRESS = re.compile(r"(\w+://)?[\w.-]*(:\w*)?/?")


def sections() -> dict[str, list[str]]:
    """The names of the settings, in lower case, under the titles of their groups."""
    groups: dict[str, list[str]] = {}
    for name in Settings.model_fields:
        if name in SECTIONS:
            names = groups[SECTIONS[name]] = []
        names.append(name)
    return groups


def default(name: str) -> str:
    """The default as a user would write it; empty if there is none."""
    value = Settings.model_fields[name].default
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def meaning(name: str) -> str:
    """What the setting does, in Markdown, after the words that it allows, if these are fixed."""
    description = Settings.model_fields[name].description or ""
    words = choices(Settings.model_fields[name])
    return f"{_either([f'`{word}`' for word in words])}: {description}" if words else description


def without_markup(markdown: str) -> str:
    """The same as plain text."""
    return markdown.replace("`", "")


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The words that a setting allows; empty if it is not limited to fixed words."""
    annotation = field.annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def allowed(name: str) -> str:
    """The values that the setting allows."""
    return allowed_in(Settings.model_fields[name]) or f"see {name.upper()} in .env.example"


def allowed_in(field: FieldInfo) -> str:
    """The values that a field allows; empty if its declaration does not say."""
    if field.annotation is bool:
        return "true or false"
    if words := choices(field):
        return _either(words)
    parts = [*field.metadata, *_parts(field.annotation)]
    texts = [each.text for each in parts if isinstance(each, Allowed)]
    # The words of an optional field are nested in its type.
    texts += [_either(get_args(each)) for each in parts if get_origin(each) is Literal]
    return next(iter(texts), "")


def shown(name: str, value: str) -> str:
    """The value, or asterisks if it may hold a password or a key."""
    address = "://" in value or name in {"HF_ENDPOINT", "OTLP_ENDPOINT"}
    if name in _SECRETS or "@" in value or (address and not _PLAIN_ADDRESS.fullmatch(value)):
        return _HIDDEN
    return value


def _either(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}"


def _parts(annotation: object) -> Iterator[object]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)
