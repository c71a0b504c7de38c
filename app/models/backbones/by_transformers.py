"""Encoders of every family without an implementation here, by transformers' modules.

Code of a checkpoint is never run.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from app.errors import StartupError
from app.models.attention.reference import Attention
from app.models.backbones.backbone import Backbone
from app.models.backbones.module_loading import LOADING_ERRORS, load_module
from app.models.backbones.module_transformer import (
    ALONE,
    ONE_LENGTH,
    PACKED,
    PADDED,
    ModuleTransformer,
    can_be_packed,
    use_packed_attention,
)
from app.models.batch.arrays import to_device
from app.models.batch.packing import pack
from app.models.batch.position_ids import PositionScheme
from app.models.checkpoint.config import read_config
from app.models.device.transfer import never_finite
from app.models.ops.proof import TOLERANCES, Proof, try_path, warn_of_refused
from app.models.ops.proof_cases import ATTENTION, Shapes
from app.models.target import Target

_LAYOUT = "batch"
# The rounding errors of all layers, as a multiple of one operation's.
_LAYERS = 4
# Tokens of the texts of the trial. Some are padded beside others, two are of one length, and one is
# longer than the blocks of windowed attention and than the window.
_TRIAL_LENGTHS = (3, 15, 17, 19, 19, 40)
_LONGEST_TRIAL = 700
_WIDEST_TRIAL = (_LONGEST_TRIAL - 9) // 2
# The attributes, of configurations and of attentions, that limit how far a token sees.
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Ids that every vocabulary has.
_TRIAL_IDS = (5, 100)
# One of them, to pad with where another padding must not change anything.
_OTHER_PADDING = 7
# The memory of attention follows from texts of so many tokens, twice and thrice as many.
_MEASURED_TOKENS = 16
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
    with _narrow_windows(module):
        proven = _Trial(folder, module, target, positions).prove()
    layout = proven.paths[_LAYOUT]
    is_packed = layout == PACKED
    return Backbone(
        ModuleTransformer(
            module,
            layout,
            proven.backend.attend if is_packed else None,
            bytes_of_pair=0.0 if is_packed else _bytes_of_pair(module, positions, target.device),
        ),
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


@contextmanager
def _narrow_windows(module: Any) -> Iterator[None]:
    """Narrow attention windows until some texts of the trial are longer, without long texts.

    A window is read where it is used, so that a wide one is computed as a narrow one.
    """
    window = getattr(module.config, "sliding_window", None) or 0
    holders = {id(each): each for part in module.modules() for each in (part, *_config_of(part))}
    before = [
        (holder, name, value)
        for holder in holders.values()
        for name in _WINDOWS
        if isinstance(value := getattr(holder, name, None), int) and value > _WIDEST_TRIAL
    ]
    # Some families add one to the configuration's number, in each attention.
    by = max(0, window - _WIDEST_TRIAL)
    for holder, name, value in before:
        narrowed = value - by if name == "sliding_window" and value - by > 0 else _WIDEST_TRIAL
        setattr(holder, name, narrowed)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


def _config_of(part: nn.Module) -> list[Any]:
    config = getattr(part, "config", None)
    return [] if config is None else [config]


class _Trial:
    """Random texts, on which the layouts of batches are compared with each text by itself."""

    def __init__(self, folder: Path, module: Any, target: Target, positions: _Positions) -> None:
        self._folder = folder
        self._module = module
        self._target = target
        window = getattr(module.config, "sliding_window", None) or 0
        longest = positions.count or _LONGEST_TRIAL
        lengths = (*_TRIAL_LENGTHS, min(_LONGEST_TRIAL, 2 * window + 9))
        random = np.random.default_rng(0)
        texts = [random.integers(*_TRIAL_IDS, min(each, longest)) for each in sorted(lengths)]
        others = [ids[::-1] if i % 2 == 0 else ids for i, ids in enumerate(texts)]
        join = partial(pack, device=target.device, positions=positions.scheme)
        self._texts = join(texts)
        # The same lengths, and every second text is another: its own tokens backwards.
        self._beside_others = join(others)
        kept = np.concatenate([np.full(len(ids), i % 2 == 1) for i, ids in enumerate(texts)])
        self._kept = to_device(target.device, np.flatnonzero(kept))

    @torch.inference_mode()
    def prove(self) -> Target:
        """Choose the first layout that computes what a text is by itself.

        Raises `StartupError` if none does.
        """
        module, target = self._module, self._target
        own_attention = module.config._attn_implementation  # noqa: SLF001 - it has no public name
        expected = self._alone()
        if not expected.cpu().isfinite().any():
            raise never_finite(f"in {self._folder}")
        refused: list[Proof] = []
        if can_be_packed(module):
            use_packed_attention(module)
            packed = target.prove(_shapes(module), (ATTENTION,))
            refused.append(self._proof(PACKED, expected, packed.backend.attend))
            if refused[0].holds:
                return replace(packed, paths=packed.paths | {_LAYOUT: PACKED})
            module.set_attn_implementation(own_attention)
        _require_unnamed(self._folder, target)
        for layout in (PADDED, ONE_LENGTH, ALONE):
            proof = self._proof(layout, expected)
            if proof.holds:
                warn_of_refused(refused, layout)
                paths = {ATTENTION: own_attention or "eager", _LAYOUT: layout}
                return replace(target, paths=paths, refused=tuple(refused))
            refused.append(proof)
        raise StartupError(
            f"the model in {self._folder}, of type {self._type}, makes other vectors of the same "
            f"text each time ({refused[-1].reason})"
        )

    @property
    def _type(self) -> Any:
        return read_config(self._folder).get("model_type")

    def _alone(self) -> Tensor:
        """The states of each text by itself."""
        try:
            return ModuleTransformer(self._module, ALONE)(self._texts)
        except (*LOADING_ERRORS, AssertionError) as error:
            raise StartupError(
                f"the model in {self._folder}, of type {self._type}, does not read texts alone: "
                f"{error}"
            ) from error

    def _proof(self, layout: str, expected: Tensor, attend: Attention | None = None) -> Proof:
        """Compare a layout with each text by itself, and with itself beside other texts.

        The second shapes are those of the first, so the tolerance is that of one operation: a
        smaller influence of padding or neighbours shows in half precision, too.
        """
        tolerance = TOLERANCES[self._target.dtype]
        states: list[Tensor] = []

        def compute() -> list[Tensor]:
            states.append(ModuleTransformer(self._module, layout, attend)(self._texts))
            return states

        proof = try_path("forward", layout, compute, [expected], _LAYERS * tolerance)
        if not proof.holds:
            return proof

        def compute_beside_others() -> list[Tensor]:
            other = ModuleTransformer(self._module, layout, attend, padding=_OTHER_PADDING)
            return [other(self._beside_others).index_select(0, self._kept)]

        kept = [states[0].index_select(0, self._kept)]
        return try_path("forward", layout, compute_beside_others, kept, tolerance)


class _LiveBytes(TorchFunctionMode):
    """Notes after each operation, in `after`, the bytes of the results that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []
        self._sizes: dict[int, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Implement `TorchFunctionMode`."""
        del types
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            # Of a function that is mapped over a batch, as one that makes a mask, only the result
            # of the map is in memory.
            if isinstance(each, Tensor) and not is_batchedtensor(each):
                storage = each.untyped_storage()
                if id(storage) not in self._sizes:
                    weakref.finalize(storage, self._sizes.pop, id(storage))
                self._sizes[id(storage)] = storage.nbytes()
        self.after.append(sum(self._sizes.values()))
        return result


@torch.inference_mode()
def _bytes_of_pair(module: Any, positions: _Positions, device: torch.device) -> float:
    """What the module takes for each pair of tokens of a text while it computes it; 0 if nothing.

    After each operation the memory in use is a polynomial of the number of tokens, and texts of
    three lengths say what the factor of its square is.
    """
    step = _MEASURED_TOKENS
    if positions.count is not None:
        step = max(1, min(step, positions.count // 3))
    counts: list[list[int]] = []
    for length in (step, 2 * step, 3 * step):
        with _LiveBytes() as live:
            ids = torch.full((1, length), _OTHER_PADDING, device=device)
            module(input_ids=ids, attention_mask=torch.ones_like(ids))
        counts.append(live.after)
    if len({len(each) for each in counts}) > 1:  # Longer texts take other operations.
        counts = [[max(each)] for each in counts]
    squares = [
        (third - 2 * second + first) / 2 for first, second, third in zip(*counts, strict=True)
    ]
    return float(max(0.0, *squares) / step**2)


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
