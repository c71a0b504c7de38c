"""Encoders of every family without an implementation here, by transformers' modules.

Code of a checkpoint is never run.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from app.engine.types import TokenIds
from app.errors import StartupError
from app.models.backbones.backbone import Backbone
from app.models.backbones.module_loading import LOADING_ERRORS, load_module
from app.models.backbones.module_transformer import (
    ModuleTransformer,
    can_be_packed,
    use_packed_attention,
)
from app.models.batch.packing import PackedBatch, pack
from app.models.batch.position_ids import PositionScheme
from app.models.checkpoint.config import read_config
from app.models.ops.proof import TOLERANCES, Proof, try_path, warn_of_refused
from app.models.ops.proof_cases import ATTENTION, Shapes
from app.models.target import Target

_LAYOUT, _PACKED, _PADDED = "batch", "packed", "padded"
# The rounding errors of all layers, as a multiple of one operation's.
_LAYERS = 4
# Tokens of the texts of the trial; one text is longer than the window, if there is one.
_TRIAL_LENGTHS = (3, 17, 40)
_LONGEST_TRIAL = 700
# Ids that every vocabulary has.
_TRIAL_IDS = (5, 100)
# The number of positions of a model that limits it nowhere.
_UNLIMITED = 2**31


def load_by_transformers(folder: Path, target: Target) -> Backbone:
    """Load the transformer in `folder`.

    Raises `StartupError` for a model that transformers does not know or cannot load.
    """
    if target.quantized:
        raise StartupError(
            "DTYPE=int8 is for models of bge-m3's and bge-reranker's kind, and this is one of type "
            f"{read_config(folder).get('model_type')}; set DTYPE to auto"
        )
    module = load_module(folder, target)
    positions = _Positions.of(module)
    proven = _prove(folder, module, target, _trial(module, positions, target.device))
    is_packed = proven.paths[_LAYOUT] == _PACKED
    return Backbone(
        ModuleTransformer(module, proven.backend.attend if is_packed else None),
        proven,
        hidden_size=int(module.config.hidden_size),
        max_length=positions.count or _UNLIMITED,
        parameters=_parameters(module),
        positions=positions.scheme,
    )


@dataclass(frozen=True, slots=True)
class _Positions:
    """The number of positions, None if it is not limited, and how they are counted."""

    count: int | None
    scheme: PositionScheme

    @classmethod
    def of(cls, module: Any) -> "_Positions":
        for name, table in module.named_modules():
            if isinstance(table, nn.Embedding) and name.endswith("position_embeddings"):
                padding = table.padding_idx
                unused = 0 if padding is None else padding + 1
                return cls(table.num_embeddings - unused, PositionScheme(padding))
        limit = getattr(module.config, "max_position_embeddings", None)
        is_limit = isinstance(limit, int) and limit > 0
        return cls(limit if is_limit else None, PositionScheme())


def _parameters(module: Any) -> int:
    """The number of weights that each token is multiplied with."""
    tables = (each for each in module.modules() if isinstance(each, nn.Embedding))
    in_tables = sum(table.weight.numel() for table in tables)
    return int(sum(each.numel() for each in module.parameters()) - in_tables)


def _trial(module: Any, positions: _Positions, device: torch.device) -> PackedBatch:
    """Random texts of several lengths, one longer than the attention window, if there is one."""
    window = getattr(module.config, "sliding_window", None) or 0
    longest = positions.count or _LONGEST_TRIAL
    lengths = (*_TRIAL_LENGTHS, min(_LONGEST_TRIAL, 2 * window + 9))
    random = np.random.default_rng(0)
    texts: list[TokenIds] = [random.integers(*_TRIAL_IDS, min(each, longest)) for each in lengths]
    return pack(texts, device=device, positions=positions.scheme)


@torch.inference_mode()
def _prove(folder: Path, module: Any, target: Target, texts: PackedBatch) -> Target:
    """Choose the layout of batches: packed if that computes the same as padding, else padded."""
    try:
        expected = ModuleTransformer(module, None)(texts)
    except (*LOADING_ERRORS, AssertionError) as error:
        kind = read_config(folder).get("model_type")
        raise StartupError(
            f"the model in {folder}, of type {kind}, does not read texts alone: {error}"
        ) from error
    own_attention = module.config._attn_implementation  # noqa: SLF001 - it has no public name
    padded = replace(target, paths={ATTENTION: own_attention or "eager", _LAYOUT: _PADDED})
    if not can_be_packed(module):
        _require_unnamed(folder, target)
        return padded
    use_packed_attention(module)
    packed = target.prove(_shapes(module), (ATTENTION,))
    proof = _prove_packed(module, packed, texts, expected)
    if proof.holds:
        return replace(packed, paths=packed.paths | {_LAYOUT: _PACKED})
    _require_unnamed(folder, target)
    module.set_attn_implementation(own_attention)
    warn_of_refused([proof], _PADDED)
    return replace(padded, refused=(proof,))


def _prove_packed(module: Any, target: Target, texts: PackedBatch, expected: Tensor) -> Proof:
    compute = ModuleTransformer(module, target.backend.attend)
    tolerance = _LAYERS * TOLERANCES[target.dtype]
    return try_path("forward", _PACKED, lambda: [compute(texts)], [expected], tolerance)


def _shapes(module: Any) -> Shapes:
    config = module.config
    heads = config.num_attention_heads
    width = config.hidden_size
    return Shapes(
        width=width,
        inner_width=getattr(config, "intermediate_size", None) or width,
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_width=getattr(config, "head_dim", None) or width // heads,
        bias=False,
        causal=any(getattr(each, "is_causal", False) for each in module.modules()),
    )


def _require_unnamed(folder: Path, target: Target) -> None:
    if target.attention_named:
        raise StartupError(
            f"the model in {folder} brings an attention of its own, which no other can replace; "
            "set ATTENTION to auto"
        )
