"""Settings from the command line, the environment and .env, in that order.

A value that is not allowed stops the start with one sentence that names the setting, the value and
what is allowed. So does a name in .env that nobody would read.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from dotenv import dotenv_values
from pydantic import ValidationError

from app.errors import StartupError
from app.settings.declaration import DOTENV, Allowed, Settings
from app.settings.flags import parse_flags
from app.settings.spelling import distance, nearest

# What .env may hold for compose alone; .env.example says what each is for.
COMPOSE_NAMES = frozenset(
    {
        "COMPOSE_FILE",
        "COMPOSE_PROFILES",
        "COMPOSE_PROJECT_NAME",
        "GRAFANA_PORT",
        "HF_CACHE_VOLUME",
        "MEMORY_LIMIT",
        "MONITORING_MEMORY_LIMIT",
        "PIDS_LIMIT",
        "PROMETHEUS_PORT",
        "QDRANT_GRPC_PORT",
        "QDRANT_MEMORY_LIMIT",
        "QDRANT_PORT",
        "QDRANT__SERVICE__API_KEY",
        "STOP_GRACE_PERIOD",
    }
)
_SETTINGS = frozenset(name.upper() for name in Settings.model_fields)
_KNOWN = _SETTINGS | COMPOSE_NAMES
# In so few letters more than one difference makes another word, such as HOME of HOST.
_SHORT = 5
_SECRETS = {"API_TOKEN", "RATE_LIMIT_STORE"}
_HIDDEN = "**********"
# Of an address what can hold no password and no key: scheme, host and port.
_PLAIN_ADDRESS = re.compile(r"(\w+://)?[\w.-]*(:\w*)?/?")


def load_settings(arguments: Sequence[str] = ()) -> Settings:
    """Read the settings; raise `StartupError` naming all that is wrong with them.

    `arguments` are those of the command line, of which `--help` prints the flags and ends the
    process.
    """
    flags: dict[str, Any] = parse_flags(arguments)
    try:
        _require_known_names()
        return Settings(**flags)
    except ValidationError as error:
        raise StartupError(describe(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{DOTENV} cannot be read: {error}") from error


def misspelt_names(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Names in the environment that are a letter or two from a setting, each with that setting."""
    for name in sorted(environment):
        upper = name.upper()
        if upper not in _KNOWN:
            for setting in sorted(_SETTINGS):
                if _may_be(upper, setting):
                    yield name, setting
                    break


def _may_be(name: str, setting: str) -> bool:
    most = 1 if len(setting) <= _SHORT else 2
    # The first is quickly told of almost all.
    return len(set(name) ^ set(setting)) <= 2 * most and distance(name, setting) <= most


def _require_known_names() -> None:
    """Raise `StartupError` for names in .env that are nobody's."""
    if not DOTENV.is_file():
        return
    names = dotenv_values(DOTENV, interpolate=False, encoding="utf-8-sig")
    unknown = [name for name in names if name.upper() not in _KNOWN]
    if unknown:
        raise StartupError("; ".join(map(_unknown, unknown)))


def _unknown(name: str) -> str:
    return f".env sets {name}, which is no setting: the nearest is {_nearest(name)}"


def _nearest(name: str) -> str:
    return nearest(name.upper(), _KNOWN)


def describe(error: ValidationError) -> str:
    """One sentence for all that is wrong with the settings."""
    return "; ".join(dict.fromkeys(_describe_one(dict(item)) for item in error.errors()))


def _describe_one(item: dict[str, Any]) -> str:
    if not item["loc"]:
        return str(item["msg"]).removeprefix("Value error, ")
    name = str(item["loc"][0])
    value = _shown(name.upper(), str(item["input"]))
    return f"{name.upper()}={value} is not allowed: {allowed(name)}"


def _shown(name: str, value: str) -> str:
    """The value, unless there may be a password or a key in it."""
    address = "://" in value or name == "OTLP_ENDPOINT"
    if name in _SECRETS or "@" in value or (address and not _PLAIN_ADDRESS.fullmatch(value)):
        return _HIDDEN
    return value


def allowed(name: str) -> str:
    """What the setting of that name, in lower case, may be."""
    field = Settings.model_fields[name]
    if field.annotation is bool:
        return "true or false"
    if get_origin(field.annotation) is Literal:
        *others, last = get_args(field.annotation)
        return f"{', '.join(others)} or {last}"
    told = [*field.metadata, *_parts(field.annotation)]
    texts = (each.text for each in told if isinstance(each, Allowed))
    return next(texts, f"see {name.upper()} in .env.example")


def _parts(annotation: object) -> Iterator[object]:
    for part in get_args(annotation):
        yield part
        yield from _parts(part)
