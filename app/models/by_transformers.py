"""Encoders of every family without an implementation here, by transformers' modules.

If the attention of a family can be replaced, its batches run packed; otherwise they are padded,
texts of similar length together. Code of a checkpoint is never run.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from app.engine.types import TokenIds
from app.errors import StartupError
from app.models.architectures.transformer import Transformer
from app.models.attention.reference import Attention
from app.models.attention.windowed import PackedAttention
from app.models.backbone import Backbone
from app.models.batch.packing import PackedBatch, pack
from app.models.checkpoint.config import read_config
from app.models.module_loading import LOADING_ERRORS, load_module
from app.models.ops.proof import TOLERANCES, Proof, try_path, warn_of_refused
from app.models.ops.proof_cases import ATTENTION, Shapes
from app.models.target import Target

_PACKED = "smart_embedder_packed"
_LAYOUT, _PADDED = "batch", "padded"
# Arguments of a family's attention that packed attention does not compute.
_NOT_PACKED = ("position_bias", "softcap", "s_aux", "cache")
# The rounding errors of all layers, as a multiple of one operation's.
_LAYERS = 4
# Tokens of the texts of the trial; one text is longer than the window, if there is one.
_TRIAL_LENGTHS = (3, 17, 40)
_LONGEST_TRIAL = 700
# Ids that every vocabulary has.
_TRIAL_IDS = (5, 100)
# Padding beside the tokens of a group that is computed together, as a share.
_MOST_PADDING = 0.25


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    *,
    packed_attention: PackedAttention,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers: from `[1, H, T, D]` to `[1, T, H, D]`.

    Raises `ValueError` for arguments that it does not compute.
    """
    del attention_mask
    unknown = [name for name in _NOT_PACKED if others.get(name) is not None]
    if unknown:
        raise ValueError(f"the attention has {', '.join(unknown)}")
    if is_causal is None:
        config = getattr(module, "config", None)
        is_causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True)
    attended = packed_attention(
        query[0], key[0], value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=bool(is_causal),
        window=sliding_window,
    )  # fmt: skip
    return attended[None], None


class ModuleTransformer(Transformer):
    """A module of transformers; `packed_by` computes its attention; if None, batches are padded."""

    shares_prefixes = False
    capturable = False

    def __init__(self, module: nn.Module, padding: int, packed_by: Target | None) -> None:
        self._module = module
        self._padding = padding
        self._packed_by = packed_by
        self._change: Callable[[Attention], Attention] = lambda attend: attend
        self.rounds_up = packed_by is not None
        self.window = getattr(module.config, "sliding_window", None)

    def __call__(self, packed: PackedBatch) -> Tensor:
        """Implement `Transformer`."""
        if self._packed_by is None:
            return torch.cat(list(self._padded(packed)))
        attention = PackedAttention(self._change(self._packed_by.backend.attend), packed)
        states: Tensor = self._module(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            packed_attention=attention,
        ).last_hidden_state
        return states[0]

    def _padded(self, packed: PackedBatch) -> Iterator[Tensor]:
        """The states of each group of sequences, padded, in packed order."""
        ids = torch.split(packed.input_ids[0], packed.lengths)
        attended = torch.split(packed.attended, packed.lengths)
        for group in groups_of(packed.lengths):
            rows = nn.utils.rnn.pad_sequence(
                list(ids[group]), batch_first=True, padding_value=float(self._padding)
            )
            lengths = torch.tensor(packed.lengths[group], device=rows.device)
            mask = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
            seen = nn.utils.rnn.pad_sequence(list(attended[group]), batch_first=True)
            states = self._module(input_ids=rows, attention_mask=seen.long()).last_hidden_state
            yield states[mask]

    def finish_loading(self) -> None:
        """Implement `Transformer`: no weights are mapped."""

    def with_attention(self, change: Callable[[Attention], Attention]) -> Self:
        """Implement `Transformer`; a padded batch hides unattended tokens by its mask."""
        changed = copy(self)
        changed._change = change  # noqa: SLF001 - its own
        return changed

    def with_fewer_layers(self) -> tuple[Self, float]:
        """Implement `Transformer`: families differ, so all layers are measured."""
        return self, 1.0


def groups_of(lengths: list[int]) -> Iterator[slice]:
    """Groups of neighbours, of ascending lengths, that need little padding."""
    start = tokens = 0
    for index, length in enumerate(lengths):
        padded = (index + 1 - start) * length
        if index > start and padded > (1 + _MOST_PADDING) * (tokens + length):
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    yield slice(start, len(lengths))


def load_by_transformers(folder: Path, target: Target) -> tuple[Backbone, int | None]:
    """Load the transformer in `folder`; return it with its number of positions, if limited.

    Raises `StartupError` for a model that transformers does not know or cannot load.
    """
    if target.quantized:
        raise StartupError(
            "DTYPE=int8 is for models of bge-m3's and bge-reranker's kind, and this is one of type "
            f"{read_config(folder).get('model_type')}; set DTYPE to auto"
        )
    module = load_module(folder, target)
    positions, offset = _positions(module)
    longest = positions or _LONGEST_TRIAL
    proven = _prove(folder, module, target, _trial(module, longest, offset, target.device))
    padding = getattr(module.config, "pad_token_id", None) or 0
    packed_by = proven if proven.paths[_LAYOUT] != _PADDED else None
    backbone = Backbone(
        ModuleTransformer(module, padding, packed_by),
        proven,
        hidden_size=_width(module),
        max_length=positions or 2**31,
        parameters=sum(each.numel() for each in module.parameters()) - _embedded(module),
        padding=offset,
    )
    return backbone, positions


def _positions(module: Any) -> tuple[int | None, int | None]:
    """The number of positions, and RoBERTa's padding id if positions are counted from it."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding) and name.endswith("position_embeddings"):
            offset = part.padding_idx
            return part.num_embeddings - (0 if offset is None else offset + 1), offset
    limit = getattr(module.config, "max_position_embeddings", None)
    return (limit if isinstance(limit, int) and limit > 0 else None), None


def _embedded(module: Any) -> int:
    tables = (each for each in module.modules() if isinstance(each, nn.Embedding))
    return sum(each.weight.numel() for each in tables)


def _width(module: Any) -> int:
    return int(module.config.hidden_size)


def _trial(module: Any, longest: int, offset: int | None, device: torch.device) -> PackedBatch:
    """Random texts of several lengths, one longer than the attention window, if there is one."""
    window = getattr(module.config, "sliding_window", None) or 0
    lengths = (*_TRIAL_LENGTHS, min(_LONGEST_TRIAL, 2 * window + 9))
    drawn = np.random.default_rng(0)
    texts: list[TokenIds] = [drawn.integers(*_TRIAL_IDS, min(each, longest)) for each in lengths]
    return pack(texts, device=device, roberta_padding=offset)


@torch.inference_mode()
def _prove(folder: Path, module: Any, target: Target, texts: PackedBatch) -> Target:
    """Choose the layout of batches: packed if that computes the same as padding, else padded."""
    padding = getattr(module.config, "pad_token_id", None) or 0
    try:
        expected = ModuleTransformer(module, padding, None)(texts)
    except (*LOADING_ERRORS, AssertionError) as error:
        kind = read_config(folder).get("model_type")
        raise StartupError(
            f"the model in {folder}, of type {kind}, does not read texts alone: {error}"
        ) from error
    own = module.config._attn_implementation  # noqa: SLF001 - it has no public name
    padded = replace(target, paths={ATTENTION: own or "eager", _LAYOUT: _PADDED})
    if not _can_be_packed(module):
        _require_unnamed(folder, target)
        return padded
    AttentionInterface.register(_PACKED, attend_packed)
    module.set_attn_implementation(_PACKED)
    proof, packed = _try_packed(module, target, texts, expected)
    if packed is not None and proof.holds:
        return packed
    _require_unnamed(folder, target)
    module.set_attn_implementation(own)
    warn_of_refused([proof], _PADDED)
    return replace(padded, refused=(proof,))


def _can_be_packed(module: Any) -> bool:
    takes_positions = "position_ids" in inspect.signature(module.forward).parameters
    return bool(module._supports_attention_backend and takes_positions)  # noqa: SLF001 - see above


def _try_packed(
    module: Any, target: Target, texts: PackedBatch, expected: Tensor
) -> tuple[Proof, Target | None]:
    proven = target.prove(_shapes(module), (ATTENTION,))
    compute = ModuleTransformer(module, 0, proven)
    tolerance = _LAYERS * TOLERANCES[target.dtype]
    proof = try_path("forward", "packed", lambda: [compute(texts)], [expected], tolerance)
    return proof, replace(proven, paths=proven.paths | {_LAYOUT: "packed"})


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
