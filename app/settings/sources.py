"""Settings from the command line, the environment and .env, in that order.

A value that is not allowed stops the start with one sentence that names the setting, the value and
the allowed values. So does an unknown name in .env. A wrong value is never replaced by the default;
an empty value counts as not set.
"""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dotenv import dotenv_values
from pydantic import ValidationError

from app.errors import StartupError
from app.settings.compose import COMPOSE_VARIABLES
from app.settings.describe import allowed, shown
from app.settings.flags import parse_flags
from app.settings.models_file import read_model_entries
from app.settings.settings import Settings

DOTENV = Path(".env")
_SETTINGS = {name.upper() for name in Settings.model_fields}
_KNOWN = _SETTINGS | {variable.name for variable in COMPOSE_VARIABLES}
# In names up to this length more than one difference makes another word, as in HOME and HOST.
_SHORT = 5
# The least similarity: two swapped pairs of letters in the shortest longer name leave more.
_ALIKE = 0.5


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
        raise StartupError(_explain(error)) from None


def _settings_in(variables: Mapping[str, str | None]) -> dict[str, str]:
    """The settings among variables, whose names may be in any case; empty ones are left out."""
    found = {name.lower(): value for name, value in variables.items() if value}
    return {name: value for name, value in found.items() if name in Settings.model_fields}


def _read_dotenv() -> dict[str, str | None]:
    """The variables in .env; raises `StartupError` if it cannot be read or has unknown names."""
    if not DOTENV.is_file():
        return {}
    try:
        variables = dotenv_values(DOTENV, encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{DOTENV} cannot be read: {error}") from error
    unknown = [name for name in variables if name.upper() not in _KNOWN]
    if unknown:
        raise StartupError("; ".join(map(_unknown, unknown)))
    return variables


def _unknown(name: str) -> str:
    (nearest,) = get_close_matches(name.upper(), sorted(_KNOWN), n=1, cutoff=0)
    return f".env sets {name}, which is no setting: the nearest is {nearest}"


def misspelt_names(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """Names in the environment that differ from a setting by a letter or two, each with it."""
    for name in sorted(environment):
        upper = name.upper()
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


def _explain(error: ValidationError) -> str:
    """One sentence for all that is wrong with the settings."""
    return "; ".join(dict.fromkeys(_explain_one(dict(item)) for item in error.errors()))


def _explain_one(item: dict[str, Any]) -> str:
    if not item["loc"]:
        return str(item["msg"]).removeprefix("Value error, ")
    name = str(item["loc"][0])
    value = shown(name.upper(), str(item["input"]))
    return f"{name.upper()}={value} is not allowed: {allowed(name)}"
