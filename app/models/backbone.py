"""The transformer between the token ids and the heads: loaded by transformers, run packed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from app.errors import StartupError
from app.jobs import TokenIds
from app.models.checkpoint import TENSOR_FILE_ERRORS, read_config
from app.models.cpu_threads import CpuThreads
from app.models.packing import PackedBatch, pack

# oneDNN compiles a kernel for every new number of rows, milliseconds for each matrix in bfloat16;
# rounded up there are so few numbers that the compiled ones are found again.
_CPU_TOKEN_MULTIPLE = 32


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


class Backbone:
    """A transformer that maps a packed batch to the hidden state of every token."""

    def __init__(self, model: PreTrainedModel, family: Family) -> None:
        config = model.config
        self._model = model.eval()
        self._family = family
        self.device = model.device
        self.dtype = model.dtype
        self.hidden_size: int = config.hidden_size
        self._cpu_threads = CpuThreads(model.num_parameters(exclude_embeddings=True))
        self._padding: int | None = config.pad_token_id if family.roberta_positions else None
        reserved = 0 if self._padding is None else self._padding + 1
        self.max_length: int = config.max_position_embeddings - reserved

    def pack(self, sequences: list[TokenIds]) -> PackedBatch:
        """Join token sequences as this transformer reads them."""
        multiple = _CPU_TOKEN_MULTIPLE if self.device.type == "cpu" else 1
        return pack(sequences, device=self.device, roberta_padding=self._padding, multiple=multiple)

    def forward(self, packed: PackedBatch) -> torch.Tensor:
        """`[T, hidden]`: the last hidden state of every token, in the model's dtype."""
        if self.device.type == "cpu":
            self._cpu_threads.set_for(packed.tokens)
        inputs: dict[str, Any] = {"use_cache": False} if not self._family.token_types else {}
        if self._family.token_types:
            inputs["token_type_ids"] = torch.zeros_like(packed.input_ids)
        output = self._model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, packed=packed, **inputs
        )
        return output.last_hidden_state[0]  # type: ignore[no-any-return]


def load_backbone(folder: Path, target: Target) -> Backbone:
    """Load the transformer in `folder` straight into the target's dtype and device.

    Raises `StartupError` for a model type not known here and for weights that are missing,
    damaged, incomplete or of another shape.
    """
    family = _family_of(folder)
    options = {"add_pooling_layer": False} if family.pooler else {}
    try:
        model, info = AutoModel.from_pretrained(
            folder,
            dtype=target.dtype,
            device_map=target.device,
            attn_implementation=target.attention,
            local_files_only=True,
            output_loading_info=True,
            weights_only=True,
            **options,
        )
    except TENSOR_FILE_ERRORS as error:
        raise StartupError(f"the weights in {folder} cannot be loaded: {error}") from error
    _refuse_incomplete(folder, info)
    return Backbone(model, family)


def _family_of(folder: Path) -> Family:
    model_type = read_config(folder).get("model_type")
    if model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise StartupError(f"{folder} holds a model of type {model_type}; known here: {known}")
    return _FAMILIES[model_type]


def _refuse_incomplete(folder: Path, info: dict[str, Any]) -> None:
    """Weights that the file lacks would be random numbers, and the vectors with them."""
    for key, word in (("missing_keys", "lacks"), ("mismatched_keys", "has another shape for")):
        if info[key]:
            names = sorted(str(name) for name in info[key])
            raise StartupError(
                f"the checkpoint in {folder} {word} {len(names)} tensors: {names[0]}"
            )
