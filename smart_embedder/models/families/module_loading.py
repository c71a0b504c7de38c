"""Loads a module of transformers with the tensors of a model's folder.

Of a model that also reads pictures or sound, it is the module for texts. A checkpoint's code is
never run.
"""

import inspect
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
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
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
)

from smart_embedder.errors import StartupError
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import preemption_point
from smart_embedder.models.families.bert import require_positions
from smart_embedder.models.files.config import read_config, unusable_value
from smart_embedder.models.files.record import current_record
from smart_embedder.models.files.weights import StoredTensor, Weights

# The most parameters of a module, relative to the stored numbers: it may also have an unused
# pooler, and tables that it computes.
_MAX_PARAMETERS = 1.5
# The names of tensors for other inputs than texts.
_OTHER_INPUTS = r"(vision|visual|image|audio|sound|speech|video|multi_modal|connector|projector)"
# The most layers of a model whose layers share their tensors.
_MAX_LAYERS = 100


class Classifier(nn.Module):
    """A classifier of transformers, whose logits are the state of each token of a sequence.

    So it is loaded, proven and run as any module. With `marks_segments` it reads which tokens are
    of the second text of a pair.
    """

    _supports_attention_backend = False  # Packed, its head would read the tokens of other texts.

    def __init__(self, classifier: Any, *, marks_segments: bool) -> None:
        super().__init__()
        self.classifier, self.config = classifier, classifier.config
        takes_segments = "token_type_ids" in inspect.signature(classifier.forward).parameters
        self.marks_segments = marks_segments and takes_segments

    @property
    def body(self) -> Any:
        """The module without its head, which is not computed in 8 bits."""
        return getattr(self.classifier, self.classifier.base_model_prefix, self.classifier)

    def forward(self, input_ids: Tensor, **options: Tensor) -> BaseModelOutput:
        """Compute `[N, L, labels]` from `input_ids` `[N, L]`."""
        logits = self.classifier(input_ids=input_ids, **options).logits
        return BaseModelOutput(logits[:, None].expand(-1, input_ids.shape[1], -1))


def load_module(folder: Path, target: Target, *, classifies: bool) -> Any:
    """Load the module in `folder`, with a head only if it `classifies`, on its device.

    Raises `StartupError` if it cannot be loaded or lacks tensors.
    """
    _require_supported(folder)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, report = _from_pretrained(folder, target, classifies=classifies)
    # A pooler that no head reads is not computed.
    missing = sorted(name for name in report["missing_keys"] if classifies or "pooler" not in name)
    if missing:
        raise StartupError(f"the checkpoint in {folder} lacks the tensor {missing[0]}")
    module.config.use_cache = False
    # Lets short forwards run between two layers. The layers are the longest list of modules.
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    for layer in max(lists, key=len, default=()):
        layer.register_forward_pre_hook(lambda *_: preemption_point())
    return module.eval().to(target.device)


def _require_supported(folder: Path) -> None:
    """Raise `StartupError` for a model that transformers cannot compute without further code."""
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


def _from_pretrained(
    folder: Path, target: Target, *, classifies: bool
) -> tuple[Any, dict[str, Any]]:
    """Load the module; return it with transformers' report of missing tensors.

    Raises `StartupError` for impossible sizes, before memory is allocated for them.
    """
    weights = Weights.read(folder)
    config, is_part = _read_text_config(folder)
    weights.require_numbers()
    for key, value in config.to_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise unusable_value(folder, key, value)
        # Each layer has its own tensors, unless all layers share them.
        if "layers" in key and type(value) is int and value > _MAX_LAYERS + len(weights.tensors):
            raise unusable_value(folder, key, value)
    auto: Any = AutoModelForTextEncoding
    if classifies:
        auto = AutoModelForSequenceClassification
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise StartupError(
                f"{folder} holds a model of type {config.model_type}, and transformers "
                f"{transformers.__version__} has no classifier of this type"
            )
    elif type(config) not in MODEL_FOR_TEXT_ENCODING_MAPPING:
        auto = AutoModel
    with torch.device("meta"):
        described = auto.from_config(config)
    if "input_ids" not in inspect.signature(described.forward).parameters:
        raise StartupError(
            f"{folder} holds a model of type {config.model_type}, which reads no texts"
        )
    # transformers would allocate missing tensors, however large they are.
    needed = sum(parameter.numel() for parameter in described.parameters())
    stored = sum(math.prod(tensor.shape) for tensor in weights.tensors.values())
    if needed > _MAX_PARAMETERS * stored:
        raise StartupError(
            f"{folder / 'config.json'} describes a model of {needed:,} numbers, and its weights "
            f"have {stored:,}"
        )
    # With the tensors, not the folder's name, from which transformers would map the files.
    loaded: tuple[Any, dict[str, Any]] = type(described).from_pretrained(
        None,
        config=config,
        state_dict=dict(_named_tensors(weights, described, is_part=is_part)),
        dtype=torch.float32 if target.quantized else target.dtype,
        output_loading_info=True,
        local_files_only=True,
    )
    if (record := current_record()) is not None:
        record.read_all_fields(folder / "config.json")
        record.leave_out(loaded[0]._keys_to_ignore_on_load_unexpected or ())  # noqa: SLF001
    return loaded


def _read_text_config(folder: Path) -> tuple[Any, bool]:
    """Read the configuration, or that of the text part of a model that also reads other inputs.

    Returns it with whether it is that of a part.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    part = getattr(config, "text_config", None)
    text = config if part is None else part
    # Most classes know this direction by another name.
    if read_config(folder).get("use_bidirectional_attention") and not hasattr(
        type(config), "use_bidirectional_attention"
    ):
        text.is_causal = False
    if part is None:
        return config, False
    if hasattr(config, "logit_scale_init_value"):
        raise StartupError(
            f"{folder} holds a model of type {config.model_type}, which projects texts and images "
            "into one space; such projections are not supported"
        )
    if (record := current_record()) is not None:
        record.leave_out([_OTHER_INPUTS])
    return part, True


def _named_tensors(
    weights: Weights, described: Any, *, is_part: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of the described module; their contents are hashed under its names.

    The hash leaves out the pooler, which is not computed, and whole numbers.
    """
    names, base, prefix = set(described.state_dict()), f"{described.base_model_prefix}.", ""
    if is_part:
        # The prefix that most often stands before a name of the part.
        prefixes = Counter(
            stored_name[: dot.end()]
            for stored_name in weights.tensors
            for dot in re.finditer(r"\.", stored_name)
            if stored_name[dot.end() :] in names
        )
        prefix = max(prefixes, key=prefixes.__getitem__, default="")
    for stored_name, tensor in weights.tensors.items():
        if stored_name.startswith(prefix):
            kept_name = stored_name.removeprefix(prefix)
            name = kept_name.removeprefix(base)
            is_read = "pooler" not in name or kept_name in names
            is_hashed = is_read and tensor.dtype.is_floating_point
            yield kept_name, replace(tensor, hashed_as=name if is_hashed else None)
