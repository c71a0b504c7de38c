"""Checkpoints on disk: where a model lies, what its files say, and its tensors.

A name is a local folder or a hub id. Every fault becomes a `StartupError` of one sentence that says
what to do.
"""

import json
import os
import pickle
import time
from dataclasses import dataclass, replace
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import httpx2
import torch
from huggingface_hub import HfApi, get_session, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError

from app.errors import StartupError

TENSOR_FILE_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,
    pickle.UnpicklingError,
    SafetensorError,
)
# In the config.json of a demo model: what to tell whoever serves it.
DEMO_KEY = "smart_embedder_demo"
_SECONDS_FOR_THE_HUB = 10.0
_SECONDS_BETWEEN_TRIES = 1.0
_WANTED_FILES = ["*.json", "*.safetensors", "*.bin", "*.pt"]
_UNWANTED_FOLDERS = ["onnx/*", "openvino/*", "imgs/*"]


@dataclass(frozen=True, slots=True)
class Hub:
    """How models are fetched: cache folder, revision, and whether the network may be used."""

    cache: Path
    revision: str | None
    offline: bool


def local_folder(name: str) -> Path:
    """The folder that the model `name` would have on this machine, were it none of the hub."""
    # Unlike pathlib's, this one does not raise where there is no home folder.
    return Path(os.path.expanduser(name))  # noqa: PTH111


def locate(name: str, hub: Hub) -> Path:
    """The folder of the model `name`, downloaded first where it is a hub id not yet on disk."""
    folder = local_folder(name)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise StartupError(f"the model folder {name} does not exist")
    try:
        return _from_hub(name, hub)
    except LocalEntryNotFoundError as error:
        reason = "" if hub.offline else "the hub cannot be reached. "
        raise StartupError(reason + _not_on_disk(name, hub)) from error
    except GatedRepoError as error:
        raise StartupError(f"the model {name} is gated: accept its terms on the hub") from error
    except RevisionNotFoundError as error:
        raise StartupError(f"the model {name} has no revision {hub.revision}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise StartupError(f"there is no model {name} on the hub or on disk") from error
    except (HfHubHTTPError, httpx2.HTTPError, ConnectionError, JSONDecodeError):
        return _without_the_hub(name, hub)
    except OSError as error:
        raise StartupError(
            f"the model {name} cannot be stored in {hub.cache}: {error}; make it writable, and "
            "large enough, or set HF_HOME to another folder"
        ) from error


def _from_hub(name: str, hub: Hub) -> Path:
    unwanted = [*_UNWANTED_FOLDERS]
    if not hub.offline:
        files = _files_on_hub(name, hub)
        if any(file.endswith(".safetensors") and "/" not in file for file in files):
            unwanted.append("*.bin")
    folder = snapshot_download(
        name,
        revision=hub.revision,
        cache_dir=hub.cache,
        local_files_only=hub.offline,
        allow_patterns=_WANTED_FILES,
        ignore_patterns=unwanted,
    )
    return Path(folder)


def _files_on_hub(name: str, hub: Hub) -> list[str]:
    """The names of the model's files: the first question, which tells whether the hub is there.

    Asked any other way, the hub's library would try six times.
    """
    hooks = get_session().event_hooks["request"]
    if _limit_waiting not in hooks:
        hooks.append(_limit_waiting)
    ask = partial(HfApi().model_info, name, revision=hub.revision)
    try:
        info = ask()
    except httpx2.TransportError:
        time.sleep(_SECONDS_BETWEEN_TRIES)
        info = ask()
    return [file.rfilename for file in info.siblings or ()]


def _limit_waiting(request: httpx2.Request) -> None:
    """Set a time limit where the hub's library would wait for ever for an answer."""
    limits = request.extensions.get("timeout", {})
    kinds = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {
        kind: limits.get(kind) or _SECONDS_FOR_THE_HUB for kind in kinds
    }


def _without_the_hub(name: str, hub: Hub) -> Path:
    """What an earlier download left; raises `StartupError` where there is none."""
    try:
        return _from_hub(name, replace(hub, offline=True))
    except LocalEntryNotFoundError as error:
        raise StartupError(f"the hub cannot be reached. {_not_on_disk(name, hub)}") from error


def _not_on_disk(name: str, hub: Hub) -> str:
    revision = f" --revision {hub.revision}" if hub.revision else ""
    return (
        f"The model {name} is not on this machine: fetch it with `hf download {name}{revision}` "
        f"where the hub can be reached, and copy it to {hub.cache} or name its folder in the "
        "setting"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StartupError(f"{folder} is not a model: it holds no config.json") from error
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


_POOLING_KEYS = {"cls": "pooling_mode_cls_token", "mean": "pooling_mode_mean_tokens"}


def read_linear(path: Path, in_features: int, out_features: int | None = None) -> torch.nn.Linear:
    """A linear head from a state dict with `weight` `[out, in]` and `bias` `[out]`.

    Raises `StartupError` where the file is missing, damaged, or of another shape.
    """
    if not path.is_file():
        raise StartupError(f"the head {path.name} is missing in {path.parent}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        weight, bias = state["weight"], state["bias"]
    except (*TENSOR_FILE_ERRORS, TypeError) as error:
        raise StartupError(f"the head {path} is damaged: {_first_line(error)}") from error
    if out_features is None:
        out_features = weight.shape[0]
    if weight.shape != (out_features, in_features) or bias.shape != (out_features,):
        raise StartupError(
            f"the head {path} has the wrong shape: weight {list(weight.shape)} and bias "
            f"{list(bias.shape)}, but [{out_features}, {in_features}] and [{out_features}] fit"
        )
    return linear_of(weight, bias)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A linear layer of these very tensors."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    linear.load_state_dict(parameters, assign=True)
    return linear


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
