"""Loads a module of transformers with the tensors of a model's folder.

Of a model that also reads pictures or sound, it is the module for texts, unless the model projects
texts and pictures into one space. A checkpoint's code is never run.
"""

import inspect
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from smart_embedder.errors import StartupError
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import preemption_point
from smart_embedder.models.families.bert import require_positions
from smart_embedder.models.families.module_heads import (
    Classified,
    Classifier,
    PageTower,
    TextTower,
    find_text_part,
)
from smart_embedder.models.files.config import (
    IMAGE_TEXT_TYPES,
    PAGE_TYPES,
    PPLX,
    read_config,
    reads_image_messages,
    unusable_value,
)
from smart_embedder.models.files.record import current_record
from smart_embedder.models.files.weights import StoredTensor, Weights

# The most parameters of a module, relative to the stored numbers: it may also have an unused
# pooler, and tables that it computes.
_MAX_PARAMETERS = 1.5
# The most layers of a model whose layers share their tensors.
_MAX_LAYERS = 100
_CLASSIFIERS: Mapping[Classified, tuple[Any, Any]] = {
    "sequences": (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification),
    "tokens": (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification),
}
# Options of a configuration that do not change a text's states.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id", "num_labels",
    "problem_type", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# The tokens of a text that tries whether a decoder computes a state for each.
_TEXT_IDS = range(5, 21)


def _projects_images(model: Any) -> bool:
    """Whether a model has vectors of texts and of pictures that can be compared."""
    return model.config.model_type in IMAGE_TEXT_TYPES | PAGE_TYPES.keys()


def load_module(
    folder: Path, target: Target, *, classifies: Classified | None, marks_segments: bool
) -> tuple[Any, Any]:
    """Load the model in `folder` on its device.

    Returns the model and the module in it that computes texts, whose states must be the same. If it
    `classifies`, both are a `Classifier`. Raises `StartupError` if it cannot be loaded or lacks
    tensors.
    """
    has_images = not classifies and reads_image_messages(folder)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, absent = _load_whole(folder, target, classifies=classifies, has_images=has_images)
    whole = whole.eval().to(target.device)
    body = whole if classifies else _without_decoder(whole)
    module: Any = whole if classifies else find_text_part(body)
    if not classifies and _projects_images(whole):
        is_of_pages = whole.config.model_type in PAGE_TYPES
        body = module = PageTower(whole) if is_of_pages else TextTower(whole)
    # A pooler that no head reads is not computed.
    read = whole if has_images else module
    computed = {id(tensor) for tensor in read.state_dict(keep_vars=True).values()}
    missing = sorted(
        name
        for name, tensor in whole.state_dict(keep_vars=True).items()
        if name in absent and id(tensor) in computed
        if classifies or "pooler" not in name
    )
    if missing:
        raise StartupError(f"the checkpoint in {folder} lacks the tensor {missing[0]}")
    whole.config.use_cache = module.config.use_cache = False
    add_preemption_points(read)
    if classifies:
        body = module = Classifier(module, marks_segments=marks_segments)
    return body, module


def add_preemption_points(module: Any) -> None:
    """Let short forwards run between two layers, which are the longest list of modules."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layers = max(lists, key=len, default=())
    has_images = isinstance(module, TextTower) or hasattr(module, "get_image_features")
    for layer in chain(*lists) if has_images else layers:
        layer.register_forward_pre_hook(lambda *_: preemption_point())


def _load_whole(
    folder: Path, target: Target, *, classifies: Classified | None, has_images: bool
) -> tuple[Any, set[str]]:
    """Load the model; return the names of tensors that its files lack, too."""
    weights, config = Weights.read(folder), _read_auto_config(folder)
    _require_possible(folder, config, weights)
    automatic = _find_class(folder, config, classifies=classifies)
    has_decoder = config.is_encoder_decoder
    if automatic is AutoModelForTextEncoding:  # T5Gemma's encoder is only made without.
        config.is_encoder_decoder = False
    if has_images and hasattr(config, "audio_config"):  # Its part is optional.
        config.audio_config = None
    with torch.device("meta"):
        described = getattr(automatic, "from_config", automatic)(config)
    _require_text_model(folder, described, weights)
    has_images = has_images or _projects_images(described)
    part = described if has_images else find_text_part(described)
    # With the tensors, not the folder's name, from which transformers would map the files.
    whole, report = type(described).from_pretrained(
        None,
        config=config,
        state_dict=dict(_name_tensors(weights, described, part)),
        dtype=torch.float32 if target.quantized else target.dtype,
        output_loading_info=True,
        local_files_only=True,
    )
    whole.config.is_encoder_decoder = has_decoder
    _record_unread(folder, described, whole)
    return whole, set(report["missing_keys"])


def _read_auto_config(folder: Path) -> Any:
    """Read the configuration, with the attention's direction where most classes know it.

    Raises `StartupError` for a model that transformers cannot compute without further code.
    """
    fields = read_config(folder)
    model_type = fields.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise StartupError(
            f"the model in {folder} needs code of its own (auto_map in config.json), and code of a "
            "checkpoint is never run"
            if "auto_map" in fields
            else f"{folder} holds a model of type {model_type}, which transformers "
            f"{transformers.__version__} does not know"
        )
    require_positions(folder, fields)
    if fields.get("architectures") == PPLX:  # transformers does not know its type.
        config = CONFIG_MAPPING[model_type].from_dict(dict(fields))
    else:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if fields.get("use_bidirectional_attention") and not hasattr(
        type(config), "use_bidirectional_attention"
    ):
        getattr(config, "text_config", config).is_causal = False
    return config


def _require_possible(folder: Path, config: Any, weights: Weights) -> None:
    """Raise `StartupError` for impossible values, before memory is allocated for them."""
    weights.require_numbers()
    for key, value in config.to_dict().items():
        is_infinite = isinstance(value, float) and not math.isfinite(value)
        # Each layer has its own tensors, unless all layers share them.
        most = _MAX_LAYERS + len(weights.tensors)
        if is_infinite or ("layers" in key and type(value) is int and value > most):
            raise unusable_value(folder, key, value)


def _find_class(folder: Path, config: Any, *, classifies: Classified | None) -> Any:
    """Return transformers' automatic class of a classifier, or of an encoder, if there is one.

    Models of pages have none; of these it is the class itself.
    """
    if classifies:
        known, automatic = _CLASSIFIERS[classifies]
        if type(config) not in known:
            raise StartupError(
                f"{folder} holds a model of type {config.model_type}, and transformers "
                f"{transformers.__version__} has no classifier of this type"
            )
        return automatic
    if config.model_type in PAGE_TYPES:
        return getattr(transformers, PAGE_TYPES[config.model_type])
    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    # Some types have an encoder only for their text part.
    if encoder is None or encoder.config_class is not type(config):
        return AutoModel
    return AutoModelForTextEncoding


def _require_text_model(folder: Path, described: Any, weights: Weights) -> None:
    """Raise `StartupError` for a model of other inputs, or larger than what is stored of it."""
    holds = f"{folder} holds a model of type {described.config.model_type}, which"
    if "input_ids" not in inspect.signature(described.forward).parameters:
        raise StartupError(f"{holds} reads no texts")
    if hasattr(described, "logit_scale") and not _projects_images(described):
        raise StartupError(
            f"{holds} projects texts and other inputs into one space in a way that is not supported"
        )
    # transformers would allocate missing tensors, however large they are.
    needed = sum(parameter.numel() for parameter in described.parameters())
    stored = sum(math.prod(tensor.shape) for tensor in weights.tensors.values())
    if needed > _MAX_PARAMETERS * stored:
        raise StartupError(
            f"{folder / 'config.json'} describes a model of {needed:,} numbers, and its weights "
            f"have {stored:,}"
        )


def _name_tensors(
    weights: Weights, described: Any, part: Any
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors; those of the part are hashed under the names that they have there.

    The hash leaves out the pooler, which is not computed, and whole numbers.
    """
    names, base, prefix = set(part.state_dict()), f"{part.base_model_prefix}.", ""
    if part is not described:
        # The prefix that most often stands before a name of the part.
        prefixes = Counter(
            stored_name[: dot.end()]
            for stored_name in weights.tensors
            for dot in re.finditer(r"\.", stored_name)
            if stored_name[dot.end() :] in names
        )
        prefix = max(prefixes, key=prefixes.__getitem__, default="")
    for stored_name, tensor in weights.tensors.items():
        kept_name = stored_name.removeprefix(prefix)
        is_read = "pooler" not in kept_name or kept_name in names
        is_hashed = stored_name.startswith(prefix) and is_read and tensor.dtype.is_floating_point
        name = kept_name.removeprefix(base) if is_hashed else None
        yield stored_name, replace(tensor, hashed_as=name)


def _record_unread(folder: Path, described: Any, whole: Any) -> None:
    """Record fields that no code of the model or its configuration names, and unneeded tensors."""
    if (record := current_record()) is None:
        return
    config, kinds = described.config, (type(described.config), type(described))
    code = "".join(inspect.getsource(sys.modules[kind.__module__]) for kind in kinds)
    known = {*dir(kinds[0]), *kinds[0].__dataclass_fields__}
    unread = (name for name in vars(config).keys() - known if name not in code)
    unread = (name for name in unread if getattr(config, name) and not name.startswith("_"))
    record.read_all_fields(folder / "config.json", set(unread))
    record.leave_out(whole._keys_to_ignore_on_load_unexpected or ())  # noqa: SLF001
    if type(described) in MODEL_FOR_TEXT_ENCODING_MAPPING.values():
        record.leave_out([r"(^|\.)decoder\."])


def describe_config(module: Any) -> list[tuple[str, str]]:
    """Describe a configuration without defaults and options that do not change the states."""

    def without(options: dict[str, Any]) -> dict[str, Any]:
        return {
            name: without(value) if isinstance(value, dict) else value
            for name, value in options.items()
            if name not in _WITHOUT_EFFECT
        }

    config = module.whole.config if isinstance(module, TextTower) else module.config
    return sorted((name, repr(value)) for name, value in without(config.to_diff_dict()).items())


@torch.inference_mode()
def _without_decoder(whole: Any) -> Any:
    """Return the encoder of a model if its decoder does not read the text, too, or the whole."""
    if not getattr(whole.config, "is_encoder_decoder", False):
        return whole
    ids, encoder = torch.tensor([_TEXT_IDS], device=whole.device), whole.get_encoder()
    try:
        reads_text = compute_states(whole, ids).shape[1] == len(_TEXT_IDS)
    except Exception:  # noqa: BLE001 - the decoder needs another text, or other inputs
        reads_text = False
    return whole if reads_text or not isinstance(encoder, PreTrainedModel) else encoder


def compute_states(module: Any, ids: Tensor) -> Tensor:
    """Compute the last states of a text, `[1, L, width]`, from `ids` `[1, L]`."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    states: Tensor | None = getattr(module(**inputs), "last_hidden_state", None)
    if states is None:  # The model has a head.
        states = module(**inputs, output_hidden_states=True).hidden_states[-1]
    return states
