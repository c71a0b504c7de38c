"""Models that run by transformers' own modules, packed: what has no faster way of ours.

transformers calls what is registered under a model's `attn_implementation` in every layer and hands
the keyword arguments of the model call through to it: that is how `packed` arrives.
"""

from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from app.errors import StartupError
from app.models.attention import Kernel, load_kernel
from app.models.backbone import Backbone, Forward, Target
from app.models.checkpoint import TENSOR_FILE_ERRORS, read_config
from app.models.compiled import leave_out
from app.models.packing import PackedBatch

_PREFIX = "packed_"


def load_transformer(auto_class: Any, folder: Path, target: Target) -> PreTrainedModel:
    """Load a model straight into the target's dtype and device.

    Raises `StartupError` for weights that are absent, damaged, incomplete or of another shape.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _refuse_int8(folder, target)
    try:
        model, info = auto_class.from_pretrained(
            folder,
            dtype=target.dtype,
            device_map=target.device,
            attn_implementation=register(target.attention, apart=target.compiled),
            local_files_only=True,
            output_loading_info=True,
            weights_only=True,
        )
    except TENSOR_FILE_ERRORS as error:
        raise StartupError(f"the weights in {folder} cannot be loaded: {error}") from error
    _refuse_wrong(folder, info)
    return model.eval()


def make_backbone(model: PreTrainedModel, target: Target) -> Backbone:
    """A decoder of Qwen3's kind behind the interface of every transformer here."""
    if target.compiled:
        _compile_layers(model)
    return Backbone(
        packed_forward(model, use_cache=False),
        target,
        hidden_size=model.config.hidden_size,
        max_length=model.config.max_position_embeddings,
        parameters=model.num_parameters(exclude_embeddings=True),
    )


def packed_forward(model: PreTrainedModel, **inputs: Any) -> Forward:
    """The packed forward by transformers' own modules, which any other must agree with."""

    def run(packed: PackedBatch) -> Tensor:
        output = model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, packed=packed, **inputs
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    return run


def register(attention: str, *, apart: bool = False) -> str:
    """Register the kernel of that name; return its name for transformers.

    One that is to stay `apart` the compiler does not look into.
    """
    name = f"{_PREFIX}apart_{attention}" if apart else _PREFIX + attention
    kernel = load_kernel(attention)
    AttentionInterface.register(name, _for_transformers(leave_out(kernel) if apart else kernel))
    AttentionMaskInterface.register(name, _no_mask)
    return name


def _for_transformers(kernel: Kernel) -> Any:
    """`kernel` behind the signature that transformers calls: `[1, H, T, D]` in, `[1, T, H, D]`."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _mask: None,
        *,
        packed: PackedBatch,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = bool(getattr(module, "is_causal", False))
        return kernel(query[0], key[0], value[0], packed, scale=scale, causal=causal)[None], None

    return attention


def _no_mask(*_: Any, **__: Any) -> None:
    """Kernels take the borders from `packed`; a mask tensor would only cost memory."""


def _compile_layers(model: PreTrainedModel) -> None:
    """Each at its first forward."""
    parts: Any = model
    for layer in parts.layers:
        layer.compile(dynamic=True)


def _refuse_int8(folder: Path, target: Target) -> None:
    if target.quantized:
        raise StartupError(
            "DTYPE=int8 is for models of bge-m3's and bge-reranker's kind, and this is one of type "
            f"{read_config(folder).get('model_type')}; set DTYPE to auto"
        )


def _refuse_wrong(folder: Path, info: dict[str, Any]) -> None:
    """Weights that the file lacks would be random numbers, and the results with them."""
    if info["mismatched_keys"]:
        first = min(str(key) for key in info["mismatched_keys"])
        raise StartupError(f"the checkpoint in {folder} has another shape for the tensor {first}")
    if info["missing_keys"]:
        first = min(info["missing_keys"])
        raise StartupError(f"the checkpoint in {folder} lacks the tensor {first}")
