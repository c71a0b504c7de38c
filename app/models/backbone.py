"""The transformer between the token ids and the heads: loaded by transformers, run packed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoModel, PreTrainedModel

from app.errors import StartupError
from app.jobs import TokenIds
from app.models.attention import REGISTERED_PREFIX, load_kernel
from app.models.calibration import calibration_sequences
from app.models.checkpoint import TENSOR_FILE_ERRORS, read_config
from app.models.compiled import compile_layers
from app.models.cpu_threads import CpuThreads
from app.models.encoder import can_take, make_encoder
from app.models.int8 import can_quantize
from app.models.packing import PackedBatch, pack
from app.models.quantized import Calibration, make_quantized_encoder

log = structlog.get_logger(__name__)

# oneDNN compiles a kernel for every new number of rows, milliseconds for each matrix in bfloat16;
# rounded up there are few numbers, and the compiled ones are found again. The fewer the rows, the
# more those cost that nobody asked for: (tokens up to, multiple).
_CPU_MULTIPLES = ((32, 1), (512, 8))
_CPU_LARGE_MULTIPLE = 32


# A packed batch to the last hidden state of every token, `[T, hidden]`.
Forward = Callable[[PackedBatch], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Family:
    """What the packed forward must know of a model family."""

    # RoBERTa counts positions from behind the padding id, the others from 0.
    roberta_positions: bool
    token_types: bool
    pooler: bool


_FAMILIES = {
    "xlm-roberta": Family(roberta_positions=True, token_types=True, pooler=True),
    "roberta": Family(roberta_positions=True, token_types=True, pooler=True),
    "bert": Family(roberta_positions=False, token_types=True, pooler=True),
    "qwen3": Family(roberta_positions=False, token_types=False, pooler=False),
}


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how a model runs."""

    device: torch.device
    dtype: torch.dtype
    attention: str
    # Matrix products in 8 bits, the rest in `dtype`.
    quantized: bool = False
    # Through PyTorch's compiler, where that has anything to gain.
    compiled: bool = False


class Backbone:
    """A transformer that maps a packed batch to the hidden state of every token."""

    def __init__(self, model: PreTrainedModel, folder: Path, target: Target) -> None:
        """Take `model` over, which was loaded from `folder`."""
        config = model.config
        family = family_of(folder)
        self.device = model.device
        self.dtype = target.dtype
        self.hidden_size: int = config.hidden_size
        self._cpu_threads = CpuThreads(model.num_parameters(exclude_embeddings=True))
        self._padding: int | None = config.pad_token_id if family.roberta_positions else None
        reserved = 0 if self._padding is None else self._padding + 1
        self.max_length: int = config.max_position_embeddings - reserved
        self._run = self._fastest(model.eval(), folder, target)

    def pack(self, sequences: list[TokenIds]) -> PackedBatch:
        """Join token sequences as this transformer reads them."""
        on_cpu = self.device.type == "cpu"
        multiple = cpu_multiple(sum(map(len, sequences))) if on_cpu else 1
        return pack(sequences, device=self.device, roberta_padding=self._padding, multiple=multiple)

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        """`[T, hidden]`: the last hidden state of every token, in the model's dtype."""
        if self.device.type == "cpu":
            self._cpu_threads.set_for(packed.tokens)
        return self._run(packed)

    def _fastest(self, model: PreTrainedModel, folder: Path, target: Target) -> Forward:
        plain = through_transformers(model, token_types=family_of(folder).token_types)
        if self.device.type != "cpu" or not (target.quantized or can_take(model)):
            if target.compiled:
                compile_layers(model)
            return plain
        if target.compiled:
            log.warning("torch_compile_ignored", reason="on a CPU this model runs without it")
        kernel = load_kernel(target.attention.removeprefix(REGISTERED_PREFIX))
        if not target.quantized:
            return make_encoder(model, kernel)
        _refuse_unquantizable(model)
        calibration = Calibration(model)
        with torch.inference_mode():
            plain(self.pack(calibration_sequences(folder)))
        return make_quantized_encoder(model, kernel, target.dtype, calibration)


def cpu_multiple(tokens: int) -> int:
    """What the rows of a forward of `tokens` are rounded up to a multiple of on a CPU."""
    return next((by for most, by in _CPU_MULTIPLES if tokens <= most), _CPU_LARGE_MULTIPLE)


def _refuse_unquantizable(model: PreTrainedModel) -> None:
    config = model.config
    if not can_take(model):
        raise StartupError(
            "DTYPE=int8 is for models of bge-m3's and bge-reranker's kind, and this is one of type "
            f"{config.model_type}; set DTYPE to auto"
        )
    if not (can_quantize(config.hidden_size) and can_quantize(config.intermediate_size)):
        raise StartupError(
            f"DTYPE=int8 needs widths that are multiples of 4, not {config.hidden_size} and "
            f"{config.intermediate_size}; set DTYPE to auto"
        )


def through_transformers(model: PreTrainedModel, *, token_types: bool) -> Forward:
    """The packed forward by transformers' own modules, which any other must agree with."""

    def run(packed: PackedBatch) -> torch.Tensor:
        inputs: dict[str, Any] = {} if token_types else {"use_cache": False}
        if token_types:
            inputs["token_type_ids"] = torch.zeros_like(packed.input_ids)
        output = model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, packed=packed, **inputs
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    return run


def load_backbone(folder: Path, target: Target) -> Backbone:
    """Load the transformer in `folder`, without any head; raises as `load_transformer`."""
    family = family_of(folder)
    options = {"add_pooling_layer": False} if family.pooler else {}
    model, missing = load_transformer(AutoModel, folder, target, **options)
    refuse_missing(folder, missing)
    return Backbone(model, folder, target)


def load_transformer(
    auto_class: Any, folder: Path, target: Target, **options: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model straight into the target's dtype and device; and which tensors its file lacks.

    Raises `StartupError` for weights that are absent, damaged or of another shape.
    """
    try:
        model, info = auto_class.from_pretrained(
            folder,
            # Rounded once, from what the file holds.
            dtype=torch.float32 if target.quantized else target.dtype,
            device_map=target.device,
            attn_implementation=target.attention,
            local_files_only=True,
            output_loading_info=True,
            weights_only=True,
            **options,
        )
    except TENSOR_FILE_ERRORS as error:
        raise StartupError(f"the weights in {folder} cannot be loaded: {error}") from error
    if info["mismatched_keys"]:
        first = min(str(key) for key in info["mismatched_keys"])
        raise StartupError(f"the checkpoint in {folder} has another shape for the tensor {first}")
    return model, sorted(info["missing_keys"])


def refuse_missing(folder: Path, missing: list[str]) -> None:
    """Weights that the file lacks would be random numbers, and the results with them."""
    if missing:
        raise StartupError(f"the checkpoint in {folder} lacks {len(missing)} tensors: {missing[0]}")


def family_of(folder: Path) -> Family:
    """The family of the model in `folder`; raises `StartupError` for a type not known here."""
    model_type = read_config(folder).get("model_type")
    if model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise StartupError(f"{folder} holds a model of type {model_type}; known here: {known}")
    return _FAMILIES[model_type]
