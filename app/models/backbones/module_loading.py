"""Loading a checkpoint into transformers' module for its family; no code of a checkpoint is run."""

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForTextEncoding
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from app.errors import StartupError
from app.models.architectures.bert_config import require_positions
from app.models.architectures.transformer import preemption_point
from app.models.checkpoint.config import read_config, unusable
from app.models.checkpoint.weights import Weights
from app.models.target import Target

# Besides what is stored, a module may have an unused pooler, and tables that it computes.
_MOST_MADE = 1.5
# Of a model whose layers share their tensors.
_MOST_LAYERS = 100
# The errors that transformers raises for files that it cannot use.
LOADING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError,
    IndexError, SafetensorError, StrictDataclassError,
)  # fmt: skip


def load_module(folder: Path, target: Target) -> Any:
    """The module in `folder`, without a head, on its device.

    Raises `StartupError` for a model that transformers does not know, or cannot load completely.
    """
    _require_known(folder)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, report = _from_pretrained(folder, target)
    except LOADING_ERRORS as error:
        reason = " ".join((str(error) or type(error).__name__).split())
        raise StartupError(f"transformers cannot load the model in {folder}: {reason}") from error
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise StartupError(f"the checkpoint in {folder} lacks the tensor {missing[0]}")
    if report["mismatched_keys"]:
        raise StartupError(f"the checkpoint in {folder} has a tensor of another shape")
    module.config.use_cache = False
    _let_short_forwards_run(module)
    return module.eval().to(target.device)


def _require_known(folder: Path) -> None:
    config = read_config(folder)
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise StartupError(
                f"the model in {folder} needs code of its own (auto_map in config.json), and code "
                "of a checkpoint is never run"
            )
        raise StartupError(
            f"{folder} holds a model of type {model_type}, which transformers "
            f"{transformers.__version__} does not know"
        )
    require_positions(folder, config)
    if "vision_config" in config or "image_size" in config or "audio_config" in config:
        raise StartupError(
            f"{folder} holds a model of type {model_type}, which reads images or sound"
        )


def _from_pretrained(folder: Path, target: Target) -> tuple[Any, dict[str, Any]]:
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    weights = Weights.read(folder)
    encodes = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    _require_sizes(folder, config, weights)
    with torch.device("meta"):
        described = (AutoModelForTextEncoding if encodes else AutoModel).from_config(config)
    # Those that are missing would be made, however large they are.
    needed = sum(each.numel() for each in described.parameters())
    stored = sum(math.prod(each.shape) for each in weights.tensors.values())
    if needed > _MOST_MADE * stored:
        raise StartupError(
            f"{folder / 'config.json'} describes a model of {needed:,} numbers, and its weights "
            f"have {stored:,}"
        )
    # Not by the folder's name: transformers would map the files.
    loaded: tuple[Any, dict[str, Any]] = type(described).from_pretrained(
        None,
        config=config,
        state_dict=dict(weights.tensors),
        dtype=target.dtype,
        output_loading_info=True,
        local_files_only=True,
    )
    return loaded


def _require_sizes(folder: Path, config: Any, weights: Weights) -> None:
    """Raise `StartupError` for sizes of which no model could be made."""
    for key, value in config.to_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise unusable(folder, key, value)
        # Every layer has tensors of its own, unless it is one that is used again and again.
        if "layers" in key and type(value) is int and value > _MOST_LAYERS + len(weights.tensors):
            raise unusable(folder, key, value)


def _let_short_forwards_run(module: nn.Module) -> None:
    """Add a preemption point before each layer; the layers are the longest list of modules."""
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    for layer in max(lists, key=len, default=[]):
        layer.register_forward_pre_hook(lambda *_: preemption_point())
