"""Reads a model's `config.json` and other files of JSON, as `StartupError` where they are wrong."""

import json
from pathlib import Path
from typing import Any

from app.errors import StartupError
from app.models.checkpoint.reading import read_file

# In the config.json of a demo model: what to tell whoever serves it.
DEMO_KEY = "smart_embedder_demo"
# No size of a model and no number of its positions is larger.
_LARGEST = 2**31


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise StartupError(f"{folder} is not a model: it holds no config.json")
    return read_object(path)


def read_json(path: Path) -> Any:
    """The value in a file of JSON."""
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise StartupError(f"{path} cannot be read: it is nested too deeply") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    config = read_json(path)
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object")
    return config


def read_optional(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file."""
    return read_object(path) if path.is_file() else {}


def whole_number(
    folder: Path, config: dict[str, Any], key: str, default: int | None = None, *, least: int = 1
) -> int:
    """The number under `key`; raises `StartupError` for any other value, or one out of range."""
    value = config.get(key, default)
    if type(value) is not int or not least <= value <= _LARGEST:
        raise unusable(folder, key, value)
    return value


def number(folder: Path, config: dict[str, Any], key: str, default: float) -> float:
    """The number under `key`; raises `StartupError` for any other value, or one not above 0.

    JSON as Python reads it has `NaN` and `Infinity`, which would make every result one of these.
    """
    value = config.get(key, default)
    if type(value) not in {int, float} or not 0 < value <= _LARGEST:
        raise unusable(folder, key, value)
    return float(value)


def unusable(folder: Path, key: str, value: Any) -> StartupError:
    """The error for a value that cannot be used."""
    return StartupError(f"{folder / 'config.json'} has no usable {key}: {value!s:.60}")
