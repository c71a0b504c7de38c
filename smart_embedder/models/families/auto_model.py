"""Encoders of every family without an implementation here, by transformers' modules.

A module is loaded, then tried: of the layouts that a batch can have, packed first, the fastest that
computes each text as if it were alone is used. Code of a checkpoint is never run.
"""

import inspect
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

from smart_embedder.errors import OutOfMemoryError, StartupError
from smart_embedder.hardware.device import memory_usage
from smart_embedder.hardware.transfer import never_finite_error
from smart_embedder.kernels.attention import (
    Attention,
    PackedAttention,
    exclude_unattended,
    has_window,
)
from smart_embedder.kernels.packed_batch import (
    PackedBatch,
    PositionScheme,
    group_for_padding,
    pack,
    to_device,
)
from smart_embedder.kernels.proof import TOLERANCES, prove, try_path
from smart_embedder.kernels.target import (
    ATTENTION,
    Proof,
    Shapes,
    Target,
    log_refused_paths,
)
from smart_embedder.models.families.backbone import (
    Backbone,
    Transformer,
    preemption_point,
)
from smart_embedder.models.families.bert import require_positions
from smart_embedder.models.families.int8 import (
    calibrating_backend,
    encode_calibration,
    warn_if_inexact,
)
from smart_embedder.models.families.module_parts import (
    Replacement,
    attend_packed,
    find_parts,
    replace_parts,
)
from smart_embedder.models.files.config import read_config, unusable
from smart_embedder.models.files.weights import StoredTensor, Weights
from smart_embedder.models.tokenizer import TextTokenizer

# Besides what is stored, a module may have an unused pooler, and tables that it computes.
_MAX_MADE = 1.5
# Of a model whose layers share their tensors.
_MAX_LAYERS = 100
# The errors that transformers raises for files that it cannot use.
LOADING_ERRORS = (
    OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError,
    IndexError, SafetensorError, StrictDataclassError,
)  # fmt: skip
# How the texts of a batch are laid out, the fastest first.
PACKED, PADDED, ONE_LENGTH, ALONE = "packed", "padded", "one_length", "alone"
_PACKED = "smart_embedder_packed"
# Padding beside the tokens of a group that is computed together, as a share.
_MAX_PADDING = {PADDED: 0.25, ONE_LENGTH: 0.0, ALONE: 0.0}
# What attention may take for a group of several texts, and for one on a CPU without asking how much
# memory is free; then one may take this share of it, because others take memory, too.
_GROUP_BYTES = 2**28
_FREE_SHARE = 0.5
_RETRY_AFTER = 30
_LAYOUT = "batch"
# What computes parts of a module: the backend, or what transformers has for them.
_PARTS, _BACKEND, TRANSFORMERS = "modules", "backend", "transformers"
# The rounding errors of all layers, as a multiple of one operation's; one product's in 8 bits.
_LAYERS = 4
_INT8_TOLERANCE = 3e-2
# Tokens of the texts of the trial. Some are padded beside others, two are of one length, and one is
# longer than the blocks of windowed attention and than the window.
_TRIAL_LENGTHS = (3, 15, 17, 19, 19, 40)
_LONGEST_TRIAL = 700
_WIDEST_TRIAL = (_LONGEST_TRIAL - 9) // 2
# The attributes, of configurations and of attentions, that limit how far a token sees.
_WINDOWS = ("sliding_window", "attention_chunk_size")
# Of rotary positions that are others in long texts: from how many tokens on. In the trial a text
# that is padded beside others is longer, and another is not.
_LONG_FROM, _TRIAL_LONG_FROM = "original_max_position_embeddings", 16
# Ids that every vocabulary has.
_TRIAL_IDS = (5, 100)
# One of them, to pad with where another padding must not change anything.
_OTHER_PADDING = 7
# The memory of attention follows from texts of so many tokens, twice and thrice as many.
_MEASURED_TOKENS = 16
# Of a configuration: what is no matter of a text's states.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id", "num_labels",
    "problem_type", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# The number of positions of a model that limits it nowhere.
_UNLIMITED = 2**31


def load_by_transformers(
    folder: Path, target: Target, read_tokenizer: Callable[[int], TextTokenizer]
) -> tuple[Backbone, TextTokenizer]:
    """Load the transformer in `folder`; raises `StartupError` where transformers cannot.

    Its tokenizer is read for the number of positions.
    """
    module = _load_module(folder, target)
    count, positions = _find_positions(module)
    tokenizer = read_tokenizer(count)
    tables = (each for each in module.modules() if isinstance(each, nn.Embedding))
    in_tables = sum(table.weight.numel() for table in tables)
    parameters = sum(each.numel() for each in module.parameters()) - in_tables
    with _lower_limits(module):
        trial = _Trial(folder, module, target, count, positions)
        target = trial.choose_layout()
    target = trial.quantize(target, tokenizer) if target.quantized else trial.use_backend(target)
    transformer = trial.transformer(target)
    if transformer.attend is None:
        transformer.bytes_per_pair = _measure_bytes_per_pair(trial.module, count, target.device)
    backbone = Backbone(
        transformer,
        target,
        hidden_size=int(module.config.hidden_size),
        max_length=count,
        parameters=parameters,
        positions=positions,
        # Without defaults, and what changes no number.
        configuration=sorted(
            (name, repr(value))
            for name, value in module.config.to_diff_dict().items()
            if name not in _WITHOUT_EFFECT
        ),
    )
    return backbone, tokenizer


def _find_positions(module: Any) -> tuple[int, PositionScheme]:
    """The number of positions, and how they are counted."""
    for name, table in module.named_modules():
        if isinstance(table, nn.Embedding) and name.endswith("position_embeddings"):
            padding = table.padding_idx
            unused = 0 if padding is None else padding + 1
            return table.num_embeddings - unused, PositionScheme(padding)
    limit: Any = getattr(module.config, "max_position_embeddings", None)
    is_limit = isinstance(limit, int) and limit > 0
    return limit if is_limit else _UNLIMITED, PositionScheme()


def _load_module(folder: Path, target: Target) -> Any:
    """The module in `folder`, without a head, on its device; raises `StartupError`."""
    _require_supported(folder)
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
    module.config.use_cache = False
    # Short forwards run between two layers, which are the longest list of modules.
    lists = [each for each in module.modules() if isinstance(each, nn.ModuleList)]
    for layer in max(lists, key=len, default=()):
        layer.register_forward_pre_hook(lambda *_: preemption_point())
    return module.eval().to(target.device)


def _require_supported(folder: Path) -> None:
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
    if not config.keys().isdisjoint(("vision_config", "image_size", "audio_config")):
        raise StartupError(
            f"{folder} holds a model of type {model_type}, which reads images or sound"
        )


def _from_pretrained(folder: Path, target: Target) -> tuple[Any, dict[str, Any]]:
    """The module, and what is said of its tensors; raises `StartupError` for impossible sizes."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    weights = Weights.read(folder)
    weights.require_numbers()
    for key, value in config.to_dict().items():
        if isinstance(value, float) and not math.isfinite(value):
            raise unusable(folder, key, value)
        # Every layer has tensors of its own, unless it is one that is used again and again.
        if "layers" in key and type(value) is int and value > _MAX_LAYERS + len(weights.tensors):
            raise unusable(folder, key, value)
    encodes = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    with torch.device("meta"):
        described = (AutoModelForTextEncoding if encodes else AutoModel).from_config(config)
    # Those that are missing would be made, however large they are.
    needed = sum(each.numel() for each in described.parameters())
    stored = sum(math.prod(each.shape) for each in weights.tensors.values())
    if needed > _MAX_MADE * stored:
        raise StartupError(
            f"{folder / 'config.json'} describes a model of {needed:,} numbers, and its weights "
            f"have {stored:,}"
        )
    # Not by the folder's name: transformers would map the files.
    loaded: tuple[Any, dict[str, Any]] = type(described).from_pretrained(
        None,
        config=config,
        state_dict=dict(_named_tensors(weights, described.base_model_prefix)),
        dtype=torch.float32 if target.quantized else target.dtype,
        output_loading_info=True,
        local_files_only=True,
    )
    return loaded


def _named_tensors(weights: Weights, prefix: str) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors, which are noted as the module calls them; the pooler is not computed."""
    for stored_name, tensor in weights.tensors.items():
        name = stored_name.removeprefix(f"{prefix}.")
        counts = "pooler" not in name and tensor.dtype.is_floating_point
        yield stored_name, replace(tensor, name=name, content=tensor.content if counts else None)


class ModuleTransformer(Transformer):
    """A module of transformers, whose batches have a `layout`; `attend` is for the packed one.

    `padding` is the token that fills rows up, by default the model's own. `bytes_per_pair` is what
    attention takes for each pair of tokens of one text, where it is quadratic.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: str,
        attend: Attention | None = None,
        padding: int | None = None,
    ) -> None:
        self._module = module
        self.layout = layout
        self.attend = attend
        own: int | None = getattr(module.config, "pad_token_id", None)
        self._padding = (own or 0) if padding is None else padding
        self.bytes_per_pair = 0.0
        self.rounds_up = layout == PACKED
        self.window = getattr(module.config, "sliding_window", None)
        # A graph does not know the lengths that a window is found by where the attention has none.
        self.capturable = attend is not None and (self.window is None or has_window(attend))

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`.

        Raises `OutOfMemoryError` for a text whose attention the free memory of a CPU does not hold.
        """
        if self.attend is None:
            self._require_memory(packed)
            states = torch.cat(list(self._padded(packed)))
        else:
            states = self._module(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                packed_attention=PackedAttention(self.attend, packed),
            ).last_hidden_state[0]
        return states if rows is None else states.index_select(0, rows)

    def _padded(self, packed: PackedBatch) -> Iterator[Tensor]:
        """The states of each group of sequences, padded, in packed order."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        ids = torch.split(packed.input_ids[0], packed.lengths)
        attended = torch.split(packed.attended, packed.lengths)
        max_pairs = _GROUP_BYTES / self.bytes_per_pair if self.bytes_per_pair else math.inf
        if self.layout == ALONE:
            max_pairs = 0.0
        for group in group_for_padding(packed.lengths, _MAX_PADDING[self.layout], max_pairs):
            input_ids = pad(list(ids[group]), padding_value=float(self._padding))
            is_token = np.arange(input_ids.shape[1]) < np.array(packed.lengths[group])[:, None]
            mask = pad(list(attended[group])).long()
            output = self._module(input_ids=input_ids, attention_mask=mask)
            # A boolean index on the device would make this thread wait for it.
            slots = to_device(packed.device, np.flatnonzero(is_token))
            yield output.last_hidden_state.flatten(0, 1).index_select(0, slots)

    def _require_memory(self, packed: PackedBatch) -> None:
        """Refuse a text whose attention a CPU's memory does not hold: the system would kill us."""
        needed = packed.max_length**2 * self.bytes_per_pair
        if packed.device.type != "cpu" or needed <= _GROUP_BYTES:
            return
        usage = memory_usage(packed.device)
        most = _FREE_SHARE * (usage.total - usage.used)
        if needed > most:
            raise OutOfMemoryError(
                f"attention over a text of {packed.max_length} tokens takes {needed / 2**30:.1f} "
                f"GiB in this model, and {max(0.0, most) / 2**30:.1f} GiB can be had; send shorter "
                "texts, or lower max_tokens or EMBED_MAX_LENGTH",
                retry_after=_RETRY_AFTER,
            )

    def without_unattended(self) -> Self:
        """Implement `Transformer`; a padded batch hides unattended tokens by its mask."""
        changed = copy(self)
        if self.attend is not None:
            changed.attend = exclude_unattended(self.attend)
        return changed


class _Trial:
    """Random texts, on which the layouts of batches are compared with each text by itself.

    The module's limits are to be low meanwhile (`_lower_limits`).
    """

    def __init__(
        self, folder: Path, module: Any, target: Target, count: int, positions: PositionScheme
    ) -> None:
        self._described = f"the model in {folder}, of type {read_config(folder).get('model_type')},"
        self._folder = folder
        self.module = module
        self._target = target
        window = getattr(module.config, "sliding_window", None) or 0
        lengths = (*_TRIAL_LENGTHS, min(_LONGEST_TRIAL, 2 * window + 9))
        random = np.random.default_rng(0)
        texts = [random.integers(*_TRIAL_IDS, min(each, count)) for each in sorted(lengths)]
        others = [ids[::-1] if i % 2 == 0 else ids for i, ids in enumerate(texts)]
        self._pack = partial(pack, device=target.device, positions=positions)
        self._texts = self._pack(texts)
        # The same lengths, and every second text is another: its own tokens backwards.
        self._beside_others = self._pack(others)
        kept = np.concatenate([np.full(len(ids), i % 2 == 1) for i, ids in enumerate(texts)])
        self._kept = to_device(target.device, np.flatnonzero(kept))

    @torch.inference_mode()
    def choose_layout(self) -> Target:
        """The target, with the first layout that computes a text as alone.

        Raises `StartupError`.
        """
        module, target = self.module, self._target
        own_attention = module.config._attn_implementation  # noqa: SLF001 - it has no public name
        try:
            self._expected = ModuleTransformer(module, ALONE)(self._texts)
        except (*LOADING_ERRORS, AssertionError) as error:
            raise StartupError(f"{self._described} does not read texts alone: {error}") from error
        if not self._expected.cpu().isfinite().any():
            raise never_finite_error(f"in {self._folder}")
        refused: list[Proof] = []
        takes_positions = "position_ids" in inspect.signature(module.forward).parameters
        # `_supports_attention_backend` has no public name.
        if module._supports_attention_backend and takes_positions:  # noqa: SLF001
            _use_packed_attention(module)
            packed = prove(target, _read_shapes(module), (ATTENTION,))
            refused.append(self._prove_layout(PACKED, packed.backend.attention))
            if refused[0].holds:
                return packed.with_path(_LAYOUT, PACKED)
            module.set_attn_implementation(own_attention)
        if target.attention_named:
            raise StartupError(
                f"the model in {self._folder} brings an attention of its own, which no other can "
                "replace; set ATTENTION to auto"
            )
        for layout in (PADDED, ONE_LENGTH, ALONE):
            proof = self._prove_layout(layout)
            if proof.holds:
                target = target.with_path(ATTENTION, own_attention or "eager")
                return target.with_path(_LAYOUT, layout, refused)
            refused.append(proof)
        raise StartupError(
            f"{self._described} makes other vectors of the same text each time "
            f"({refused[-1].reason})"
        )

    def transformer(self, target: Target) -> ModuleTransformer:
        """The module, as it is now, in the layout of a target."""
        layout = target.paths[_LAYOUT]
        attend = target.backend.attention if layout == PACKED else None
        return ModuleTransformer(self.module, layout, attend)

    @torch.inference_mode()
    def use_backend(self, target: Target) -> Target:
        """Let the backend compute the parts that it can, where the model stays what it is."""
        proven, parts = self._prove_parts(target)
        replace_parts(parts, proven.backend)
        proof = self._prove_replaced_parts(proven)
        if proof.holds:
            return proven
        log_refused_paths([proof], TRANSFORMERS)
        self.module = _load_module(self._folder, self._target)
        if target.paths[_LAYOUT] == PACKED:
            _use_packed_attention(self.module)
        return replace(target, refused=(*target.refused, proof))

    @torch.inference_mode()
    def quantize(self, target: Target, tokenizer: TextTokenizer) -> Target:
        """Compute the products in 8 bits, by the states of some texts; raises `StartupError`."""
        texts = encode_calibration(tokenizer)
        packed = self._pack(texts)
        exact = self.transformer(target)(packed)
        target, parts = self._prove_parts(target)
        transformer = self.transformer(target)
        # In one call, of one text where others cannot be beside it.
        joined = np.concatenate(texts)[: tokenizer.max_length]
        try:
            with calibrating_backend(target.backend, target.dtype) as int8_backend:
                replace_parts(parts, int8_backend)
                for parameter in self.module.parameters():
                    parameter.data = parameter.data.to(target.dtype)
                transformer(packed if transformer.layout == PACKED else self._pack([joined]))
        except LOADING_ERRORS as error:
            reason = " ".join(str(error).split())
            raise StartupError(
                f"{self._described} is not computed in 8 bits: {reason}; set DTYPE to auto"
            ) from error
        proof = self._prove_replaced_parts(target)
        if not proof.holds:
            raise StartupError(
                f"{self._described} is not computed in 8 bits as it is ({proof.reason}); set DTYPE "
                "to auto"
            )
        warn_if_inexact(self._folder.name, transformer(packed), exact, packed)
        return target

    def _prove_parts(self, target: Target) -> tuple[Target, list[Replacement]]:
        """What can be replaced, and the operations that this takes proven."""
        parts = find_parts(self.module, target.dtype, packed=target.paths[_LAYOUT] == PACKED)
        operations = {name for part in parts for name in part.operations}
        return prove(target, _read_shapes(self.module), sorted(operations)), parts

    def _prove_replaced_parts(self, target: Target) -> Proof:
        with _lower_limits(self.module):
            transformer = self.transformer(target)
            proof = self._prove_layout(transformer.layout, transformer.attend)
        return replace(proof, operation=_PARTS, path=_BACKEND)

    def _prove_layout(self, layout: str, attend: Attention | None = None) -> Proof:
        """Compare a layout with each text by itself, and with itself beside other texts.

        The second shapes are those of the first, so the tolerance is that of one operation: a
        smaller influence of padding or neighbours shows in half precision, too.
        """
        tolerance = TOLERANCES[self._target.dtype]
        rounding = _LAYERS * (_INT8_TOLERANCE if self._target.quantized else tolerance)
        states: list[Tensor] = []

        def compute() -> list[Tensor]:
            states.append(ModuleTransformer(self.module, layout, attend)(self._texts))
            return states

        def compute_beside_others() -> list[Tensor]:
            other = ModuleTransformer(self.module, layout, attend, _OTHER_PADDING)
            return [other(self._beside_others).index_select(0, self._kept)]

        proof = try_path("forward", layout, compute, [self._expected], rounding)
        if not proof.holds:
            return proof
        kept = [states[0].index_select(0, self._kept)]
        return try_path("forward", layout, compute_beside_others, kept, tolerance)


def _use_packed_attention(module: Any) -> None:
    """Let a module compute packed attention."""
    AttentionInterface.register(_PACKED, attend_packed)
    module.set_attn_implementation(_PACKED)


def _read_shapes(module: Any) -> Shapes:
    config = module.config
    heads, width = getattr(config, "num_attention_heads", 1), config.hidden_size
    return Shapes(
        width,
        getattr(config, "intermediate_size", None) or width,
        heads,
        getattr(config, "num_key_value_heads", None) or heads,
        getattr(config, "head_dim", None) or width // heads,
        bias=False,
        causal=any(getattr(each, "is_causal", False) for each in module.modules()),
    )


@contextmanager
def _lower_limits(module: Any) -> Iterator[None]:
    """Lower what makes long texts others than short ones until some texts of the trial are long.

    Those are attention windows, and the number of tokens from which on rotary positions are others
    (`longrope`). They are read where they are used, so that a high limit is computed as a low one.
    """
    window = getattr(module.config, "sliding_window", None) or 0
    # Some families add one to the configuration's number, in each attention.
    by = max(0, window - _WIDEST_TRIAL)
    parts = list(module.modules())
    configs = [part.config for part in parts if getattr(part, "config", None) is not None]
    with ExitStack() as before:
        for holder in {id(each): each for each in (*parts, *configs)}.values():
            for name in _WINDOWS:
                value = getattr(holder, name, None)
                if isinstance(value, int) and value > _WIDEST_TRIAL:
                    narrowed = value - by if name == "sliding_window" else 0
                    before.callback(setattr, holder, name, value)
                    setattr(holder, name, narrowed if narrowed > 0 else _WIDEST_TRIAL)
        for config in configs:
            rotary = getattr(config, "rope_parameters", None) or {}
            # Those of every layer, or of every kind of layers.
            for each in (rotary, *rotary.values()):
                is_long = isinstance(each, dict) and each.get("rope_type") == "longrope"
                if is_long and _LONG_FROM in each:
                    before.callback(each.__setitem__, _LONG_FROM, each[_LONG_FROM])
                    each[_LONG_FROM] = _TRIAL_LONG_FROM
        yield


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
def _measure_bytes_per_pair(module: Any, positions: int, device: torch.device) -> float:
    """What the module takes for each pair of tokens of a text while it computes it; 0 if nothing.

    After each operation the memory in use is a polynomial of the number of tokens, and texts of
    three lengths say what the factor of its square is.
    """
    step = max(1, min(_MEASURED_TOKENS, positions // 3))
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
