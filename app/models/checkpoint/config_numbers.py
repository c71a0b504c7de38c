"""Numbers in a model's `config.json`."""

from pathlib import Path
from typing import Any

from app.errors import StartupError


def whole_number(
    folder: Path, config: dict[str, Any], key: str, default: int | None = None, *, least: int = 1
) -> int:
    """The number under `key`; raises `StartupError` for any other value, or one below `least`."""
    value = config.get(key, default)
    if type(value) is not int or value < least:
        raise unusable(folder, key, value)
    return value


def number(folder: Path, config: dict[str, Any], key: str, default: float) -> float:
    """The number under `key`; raises `StartupError` for any other value, or one below 0."""
    value = config.get(key, default)
    if type(value) not in {int, float} or value < 0:
        raise unusable(folder, key, value)
    return float(value)


def unusable(folder: Path, key: str, value: Any) -> StartupError:
    """What is raised for a value that makes no sense."""
    return StartupError(f"{folder / 'config.json'} has no usable {key}: {value}")
