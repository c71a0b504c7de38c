"""What a model's `config.json` and its pooling's say."""

import json
from pathlib import Path
from typing import Any

from app.errors import StartupError

# In the config.json of a demo model: what to tell whoever serves it.
DEMO_KEY = "smart_embedder_demo"
_POOLING_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        raise StartupError(f"{folder} is not a model: it holds no config.json")
    return _read_object(path)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object")
    return config


def read_pooling(folder: Path) -> str:
    """`cls` or `mean`, from sentence-transformers' `1_Pooling/config.json`; `cls` without one."""
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return "cls"
    modes = read_config(path.parent)
    chosen = [mode for mode in ("cls", "mean") if modes.get(_POOLING_KEYS[mode])]
    if len(chosen) != 1:
        raise StartupError(f"{path} names no pooling that is known here: use cls or mean")
    return chosen[0]


def read_prompts(folder: Path) -> dict[str, str]:
    """The prompts by name of sentence-transformers' configuration; none where all are empty."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}
    prompts = _read_object(path).get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise StartupError(f"{path} has no usable prompts: each is a string under its name")
    return prompts if any(prompts.values()) else {}


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
