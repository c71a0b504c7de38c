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
from typing import Any, Literal

import numpy.typing as npt
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
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from smart_embedder.errors import StartupError, one_line
from smart_embedder.kernels.proof import TOLERANCES, try_path
from smart_embedder.kernels.target import Target
from smart_embedder.models.families.backbone import preemption_point
from smart_embedder.models.families.bert import require_positions
from smart_embedder.models.files.config import IMAGE_TEXT_TYPES, PPLX, read_config, unusable_value
from smart_embedder.models.files.record import current_record
from smart_embedder.models.files.weights import StoredTensor, Weights

# What a classifier labels.
Classified = Literal["sequences", "tokens"]
# The most parameters of a module, relative to the stored numbers: it may also have an unused
# pooler, and tables that it computes.
_MAX_PARAMETERS = 1.5
# The most layers of a model whose layers share their tensors.
_MAX_LAYERS = 100
# The tokens of a text, which a model and its text part compute to the same states.
_TEXT_IDS = range(5, 21)
# Options of a configuration that do not change a text's states.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id", "num_labels",
    "problem_type", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# What words in an error of transformers say about a model that cannot compute a text alone.
_REASONS = {
    r"last_hidden_state": "makes no state for each token of a text",
    r"(?i)bbox": "needs the place of each word on a page",
    r"pixel_values|image_embeds|visual_feats": "needs a picture with each text",
    r"input_features|input_values": "needs sound with each text",
    r"Input language": "needs the language of each text, which its config.json does not name in "
    "default_language",
    r"<eos>": "reads the state of the token eos_token_id, which the tokenizer does not add",
}


class Classifier(nn.Module):
    """A classifier of transformers, whose logits are the states of its tokens.

    So it is loaded, proven and run as any module. All tokens of a sequence have its logits, unless
    the classifier labels tokens. With `marks_segments` it reads which tokens are of the second text
    of a pair.
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
        if logits.dim() == 2:  # noqa: PLR2004 - of sequences
            logits = logits[:, None].expand(-1, input_ids.shape[1], -1)
        return BaseModelOutput(logits)


class TextTower(nn.Module):
    """The texts of a model that projects texts and pictures into one space.

    The vector of a text is the state of each of its tokens, so it is loaded, proven and run as any
    module.
    """

    _supports_attention_backend = False  # Packed, its pooling would read the tokens of other texts.

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole, self.config = whole, whole.config.text_config

    @property
    def body(self) -> Any:
        """The part that reads texts; pictures are computed by transformers' own modules."""
        return _find_text_part(self.whole)

    def forward(self, input_ids: Tensor, **options: Tensor) -> BaseModelOutput:
        """Compute `[N, L, width]` from `input_ids` `[N, L]`."""
        found = self.whole.get_text_features(input_ids=input_ids, **options)
        return BaseModelOutput(found.pooler_output[:, None].expand(-1, input_ids.shape[1], -1))

    def encode_images(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[Tensor, int]:
        """Compute the vectors of pictures, `[N, width]`, and return the tokens of each, too."""
        device, dtype = self.whole.device, self.whole.dtype
        tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        found = self.whole.get_image_features(**tensors)
        return found.pooler_output, found.last_hidden_state.shape[1]


def _projects_images(described: Any) -> bool:
    """Whether a model has vectors of texts and of pictures that can be compared."""
    return described.config.model_type in IMAGE_TEXT_TYPES


def load_module(folder: Path, target: Target, *, classifies: Classified | None) -> Any:
    """Load the module in `folder`, with a head only if it `classifies`, on its device.

    Raises `StartupError` if it cannot be loaded or lacks tensors.
    """
    _require_supported(folder)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, report = _from_pretrained(folder, target, classifies=classifies)
    whole = whole.eval().to(target.device)
    body = whole if classifies else _without_decoder(whole)
    module: Any = whole if classifies else _find_text_part(body)
    if not classifies and _projects_images(whole):
        body = module = TextTower(whole)
    # A pooler that no head reads is not computed.
    computed = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    missing = sorted(
        name
        for name, tensor in whole.state_dict(keep_vars=True).items()
        if name in report["missing_keys"] and id(tensor) in computed
        if classifies or "pooler" not in name
    )
    if missing:
        raise StartupError(f"the checkpoint in {folder} lacks the tensor {missing[0]}")
    whole.config.use_cache = module.config.use_cache = False
    if module is not body:
        _require_same_states(folder, body, module, target)
    # Lets short forwards run between two layers. The layers are the longest list of modules.
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layers = max(lists, key=len, default=())
    for layer in chain(*lists) if isinstance(module, TextTower) else layers:
        layer.register_forward_pre_hook(lambda *_: preemption_point())
    return module


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


@torch.inference_mode()
def _without_decoder(whole: Any) -> Any:
    """Return the encoder of a model if its decoder does not read the text, too, or the whole."""
    if getattr(whole.config, "is_encoder_decoder", False):
        try:
            count = _compute_states(whole).shape[1]
        except Exception:  # noqa: BLE001 - the decoder needs another text, or other inputs
            count = 0
        encoder = whole.get_encoder()
        if count != len(_TEXT_IDS) and isinstance(encoder, PreTrainedModel):
            return encoder
    return whole


def _find_text_part(module: Any) -> Any:
    """Return the part that computes the texts of a model with other inputs, or the whole."""
    text_config = getattr(module.config, "text_config", None)
    parts = (
        part
        for part in module.modules()
        if isinstance(part, PreTrainedModel) and type(part.config) is type(text_config)
        if not part.can_generate()  # The part without the head of a language model.
    )
    return next(parts, module)


def _compute_states(module: Any) -> Tensor:
    """Compute the last states of a short text, `[1, L, width]`."""
    ids = torch.tensor([_TEXT_IDS], device=module.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    states: Tensor | None = getattr(module(**inputs), "last_hidden_state", None)
    if states is None:  # The model has a head.
        states = module(**inputs, output_hidden_states=True).hidden_states[-1]
    return states


@torch.inference_mode()
def _require_same_states(folder: Path, whole: Any, part: Any, target: Target) -> None:
    """Raise `StartupError` if a model computes a text otherwise than its text part."""
    described = f"the model in {folder}, of type {whole.config.model_type},"
    try:
        expected = _compute_states(whole)
    except Exception as error:
        raise cannot_compute_error(described, error) from error
    tolerance = TOLERANCES[target.dtype]
    proof = try_path("forward", "text", lambda: [_compute_states(part)], [expected], tolerance)
    if not proof.holds:
        raise StartupError(
            f"{described} computes a text otherwise than its text part, which alone could be "
            f"served ({proof.reason})"
        )


def cannot_compute_error(described: str, error: Exception) -> StartupError:
    """Return an error that says why a model cannot compute a text, as far as `error` tells."""
    message = one_line(error)
    reasons = (reason for words, reason in _REASONS.items() if re.search(words, message))
    reason = next(reasons, "cannot compute every text alone in its batch")
    return StartupError(f"{described} {reason}: {message}")


def _from_pretrained(
    folder: Path, target: Target, *, classifies: Classified | None
) -> tuple[Any, dict[str, Any]]:
    """Load the module; return it with transformers' report of missing tensors.

    Raises `StartupError` for impossible sizes, before memory is allocated for them.
    """
    weights = Weights.read(folder)
    config = _read_auto_config(folder)
    weights.require_numbers()
    for key, value in config.to_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise unusable_value(folder, key, value)
        # Each layer has its own tensors, unless all layers share them.
        if "layers" in key and type(value) is int and value > _MAX_LAYERS + len(weights.tensors):
            raise unusable_value(folder, key, value)
    automatic = _find_class(folder, config, classifies=classifies)
    has_decoder = config.is_encoder_decoder
    if automatic is AutoModelForTextEncoding:  # T5Gemma's encoder is only made without.
        config.is_encoder_decoder = False
    with torch.device("meta"):
        described = automatic.from_config(config)
    if "input_ids" not in inspect.signature(described.forward).parameters:
        raise StartupError(
            f"{folder} holds a model of type {config.model_type}, which reads no texts"
        )
    if hasattr(described, "logit_scale") and not _projects_images(described):
        raise StartupError(
            f"{folder} holds a model of type {config.model_type}, which projects texts and other "
            "inputs into one space in a way that is not supported"
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
        state_dict=dict(_name_tensors(weights, described)),
        dtype=torch.float32 if target.quantized else target.dtype,
        output_loading_info=True,
        local_files_only=True,
    )
    loaded[0].config.is_encoder_decoder = has_decoder
    if (record := current_record()) is not None:
        record.read_all_fields(folder / "config.json", _find_unread_fields(described))
        record.leave_out(loaded[0]._keys_to_ignore_on_load_unexpected or ())  # noqa: SLF001
        if type(described) in MODEL_FOR_TEXT_ENCODING_MAPPING.values():
            record.leave_out([r"(^|\.)decoder\."])
    return loaded


def _read_auto_config(folder: Path) -> Any:
    """Read the configuration, with the attention's direction where most classes know it."""
    fields = read_config(folder)
    if fields.get("architectures") == PPLX:  # transformers does not know its type.
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    else:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if fields.get("use_bidirectional_attention") and not hasattr(
        type(config), "use_bidirectional_attention"
    ):
        getattr(config, "text_config", config).is_causal = False
    return config


def _find_unread_fields(described: Any) -> set[str]:
    """Find fields that were set, but that no code of the model or its configuration names."""
    config = described.config
    kinds = (type(config), type(described))
    code = "".join(inspect.getsource(sys.modules[kind.__module__]) for kind in kinds)
    known = {*dir(kinds[0]), *kinds[0].__dataclass_fields__}
    unread = (name for name in vars(config).keys() - known if name not in code)
    return {name for name in unread if getattr(config, name) and not name.startswith("_")}


def _find_class(folder: Path, config: Any, *, classifies: Classified | None) -> Any:
    """Return transformers' automatic class of a classifier, or of an encoder, if there is one."""
    if classifies:
        known, automatic = {
            "sequences": (
                MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
                AutoModelForSequenceClassification,
            ),
            "tokens": (MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoModelForTokenClassification),
        }[classifies]
        if type(config) not in known:
            raise StartupError(
                f"{folder} holds a model of type {config.model_type}, and transformers "
                f"{transformers.__version__} has no classifier of this type"
            )
        return automatic
    encoder = MODEL_FOR_TEXT_ENCODING_MAPPING.get(type(config), None)
    # Some types have an encoder only for their text part.
    if encoder is None or encoder.config_class is not type(config):
        return AutoModel
    return AutoModelForTextEncoding


def _name_tensors(weights: Weights, described: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors; those of the text part are hashed under the names that they have there.

    The hash leaves out the pooler, which is not computed, and whole numbers.
    """
    part = described if _projects_images(described) else _find_text_part(described)
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
