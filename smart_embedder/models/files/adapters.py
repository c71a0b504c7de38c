"""Reads LoRA adapters, and adds them to the weights of their base model.

A folder with an adapter is read through a temporary folder of links, which has the files of the
base model and, in place of those of the same name, the adapter's. A tensor gets its product of two
small matrices when it is read, so that the space of vectors depends on both.
"""

import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog
from torch import Tensor

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import read_optional, transformer_folder, unusable_value

log = structlog.get_logger(__name__)

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# Files of whole models, which an adapter's folder may have, too, and which are the base model's.
_WHOLE = re.compile(
    r"(config\.json|(model|pytorch_model)[^/]*\.(safetensors|bin)(\.index\.json)?)$"
)
_MATRIX = 2  # Its dimensions.
# Before the names of layers in an adapter.
_PREFIX = "base_model.model."
_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"
# Fields that say where an adapter came from, how it was trained, or what its tensors show.
_WITHOUT_EFFECT = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "megatron_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "task_type", "use_rslora",
}  # fmt: skip
# Other beginnings of the training change the base model.
_INITIAL_WEIGHTS = (True, False, "gaussian", "orthogonal", "eva")
# Temporary folders, which are removed at the end of the process.
_overlays: dict[tuple[Path, Path], TemporaryDirectory[str]] = {}


@dataclass(frozen=True, slots=True)
class LowRank:
    """A product of two matrices that is added to a tensor: `scale * second @ first`."""

    first: Callable[[], Tensor]
    second: Callable[[], Tensor]
    scale: float
    is_transposed: bool

    def compute(self) -> Tensor:
        """Compute the product in float32."""
        product = self.scale * (self.second() @ self.first())
        return product.T.contiguous() if self.is_transposed else product


def overlay_adapter(folder: Path, find_base: Callable[[str, str | None], Path]) -> Path:
    """Return a folder with the files of an adapter over those of its base model.

    `find_base` finds a model by its name and revision. A folder without an adapter is returned as
    it is. Raises `StartupError` for an adapter of another form.
    """
    if not (folder / CONFIG_FILE).is_file():
        return folder
    config = require_lora(folder)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        raise StartupError(f"{folder / CONFIG_FILE} names no base model (base_model_name_or_path)")
    if not isinstance(revision, str | None):
        raise unusable_value(folder, "revision", revision, CONFIG_FILE)
    base = find_base(name, revision)
    if (base / CONFIG_FILE).is_file():
        raise StartupError(
            f"{folder} holds an adapter for {name}, which is an adapter, too: merge them into the "
            "weights (merge_and_unload of peft), and take the merged model"
        )
    if not (base / "config.json").is_file():
        raise StartupError(f"{folder} holds an adapter for {name}, which holds no config.json")
    try:
        overlay = _lay_over(folder, base)
    except OSError as error:
        raise StartupError(
            f"the files of the adapter in {folder} cannot be linked in a temporary folder: "
            f"{error}; set TMPDIR to a folder that can be written to"
        ) from error
    if transformer_folder(overlay) != overlay:
        raise StartupError(
            f"{folder} holds an adapter for a transformer in a folder of its own, which is not "
            "supported: merge it into the weights (merge_and_unload of peft)"
        )
    log.info("adapter_added", model=folder.name, base=name)
    return overlay


def _lay_over(folder: Path, base: Path) -> Path:
    """Link the files of an adapter, and those of its base model, in a temporary folder."""
    if (folder, base) not in _overlays:
        _overlays[folder, base] = TemporaryDirectory(prefix="adapter-")
    overlay = Path(_overlays[folder, base].name) / folder.name
    for source in (folder, base):
        for path in source.rglob("*"):
            link = overlay / path.relative_to(source)
            is_of_base = path.parent == folder and _WHOLE.match(path.name)
            if is_of_base or not path.is_file() or link.exists():
                continue
            link.parent.mkdir(parents=True, exist_ok=True)
            try:
                link.symlink_to(path.resolve())
            except OSError:  # Not every user of Windows may make links.
                shutil.copyfile(path, link)
    return overlay


def require_lora(folder: Path) -> dict[str, Any]:
    """Read the adapter's configuration; raises `StartupError` unless it is a plain LoRA."""
    config = read_optional(folder / CONFIG_FILE)
    problem = next(
        (name for name, value in config.items() if value and name not in _WITHOUT_EFFECT), None
    )
    if config.get("peft_type") != "LORA":
        problem = f"peft_type {config.get('peft_type')}"
    elif config.get("init_lora_weights", True) not in _INITIAL_WEIGHTS:
        problem = f"init_lora_weights {config['init_lora_weights']}"
    if problem is not None:
        raise StartupError(
            f"{folder} holds an adapter with {problem:.60}, and only plain LoRA is supported: "
            "merge it into the weights (merge_and_unload of peft), and take the merged model"
        )
    # Values that are wrong for any layer are refused before a temporary folder is made.
    _read_scale(folder, config, "", rank=1)
    return config


def add_adapter(
    folder: Path, base: Mapping[str, Any], tensors: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the tensors of a base model with an adapter's: added to them, or in place of them."""
    config = require_lora(folder)
    merged = dict(base)
    for full_name, tensor in tensors.items():
        name = full_name.removeprefix(_PREFIX).replace(".modules_to_save.", ".")
        if name.endswith(_SECOND):
            continue
        layer = name.removesuffix(_FIRST)
        partner = tensors.get(full_name.removesuffix(_FIRST) + _SECOND)
        is_linear = partner is not None and len(tensor.shape) == len(partner.shape) == _MATRIX
        if "lora_" in name and not is_linear:
            raise StartupError(
                f"{folder} holds an adapter with the tensor {full_name}, and only LoRA of linear "
                "layers is supported: merge it into the weights (merge_and_unload of peft)"
            )
        stored = _find_stored(f"{layer}.weight" if is_linear else name, base)
        if len(stored) > 1 or (is_linear and not stored):
            raise StartupError(
                f"{folder} holds an adapter for {layer}, and its base model has "
                f"{len(stored) or 'no'} tensors of this name"
            )
        if partner is None:
            merged[stored[0] if stored else name] = tensor
            continue
        is_transposed = bool(config.get("fan_in_fan_out"))
        shape = (partner.shape[0], tensor.shape[1])[:: -1 if is_transposed else 1]
        # PyTorch would repeat a row or a column to fit.
        if shape != base[stored[0]].shape or not partner.shape[1] == tensor.shape[0] > 0:
            raise StartupError(
                f"{folder} holds an adapter of {[*partner.shape]} and {[*tensor.shape]} for "
                f"{layer}, which has {[*base[stored[0]].shape]} in its base model"
            )
        scale = _read_scale(folder, config, layer, tensor.shape[0])
        product = LowRank(
            tensor.read_exactly, partner.read_exactly, scale, is_transposed=is_transposed
        )
        merged[stored[0]] = replace(base[stored[0]], added=product)
    return merged


def _find_stored(name: str, names: Iterable[str]) -> list[str]:
    """Find the names of a layer's tensor in the base model, whose prefix may be another."""
    return [
        stored
        for stored in names
        if f".{stored}".endswith(f".{name}") or name.endswith(f".{stored}")
    ]


def _read_scale(folder: Path, config: dict[str, Any], layer: str, rank: int) -> float:
    alpha, patterns = config.get("lora_alpha", 8), config.get("alpha_pattern") or {}
    try:
        of_layer = [
            value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", layer)
        ]
    except (AttributeError, re.error) as error:
        raise unusable_value(folder, "alpha_pattern", patterns, CONFIG_FILE) from error
    alpha = next(iter(of_layer), alpha)
    if type(alpha) not in {int, float} or not math.isfinite(alpha):
        raise unusable_value(folder, "lora_alpha or alpha_pattern", alpha, CONFIG_FILE)
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
