"""Encoders of families without an implementation here, computed by transformers' modules.

A module's forward runs on groups of texts of near lengths with padding, if a trial at the start
finds that each text then has the same states as alone; else on groups of one length, or on each
text alone. The types in `PACKED_TYPES` run on packed texts, with linear layers, norms and attention
by the backend, and if anything goes wrong in that trial, they run as all others do. If anything
goes wrong there, the start ends with one sentence.
"""

import math
import re
import weakref
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from smart_embedder.errors import OutOfMemoryError, StartupError, one_line
from smart_embedder.hardware.device import memory_usage
from smart_embedder.hardware.transfer import never_finite_error
from smart_embedder.kernels.attention import (
    Attention,
    PackedAttention,
    exclude_unattended,
    has_window,
)
from smart_embedder.kernels.packed_batch import (
    SECOND_SEGMENT,
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
)
from smart_embedder.models.families.int8 import (
    calibrating_backend,
    encode_calibration,
    warn_if_inexact,
)
from smart_embedder.models.families.module_loading import (
    Classified,
    Classifier,
    TextTower,
    cannot_compute_error,
    describe_config,
    load_module,
)
from smart_embedder.models.families.module_parts import (
    PACKED_TYPES,
    attend_packed,
    find_parts,
    replace_parts,
)
from smart_embedder.models.files.config import read_config
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.tokens import TokenIds

log = structlog.get_logger(__name__)

# The layouts of the texts of a batch, the fastest first.
PACKED, PADDED, ONE_LENGTH, ALONE = "packed", "padded", "one_length", "alone"
# The most padding of a group that is computed together, as a share of its tokens.
_MAX_PADDING = {PADDED: 0.25, ONE_LENGTH: 0.0, ALONE: 0.0}
_PACKED_ATTENTION = "smart_embedder_packed"
# The kinds of rotary positions that depend on the longest text of a batch.
_KINDS_BY_LONGEST = {"dynamic", "longrope"}
# The most memory of attention for a group of several texts, and for a single text on a CPU before
# the free memory is checked. Then a text may take this share of it, as others need memory, too.
_GROUP_BYTES = 2**28
_FREE_SHARE = 0.5
_RETRY_AFTER = 30
# Names in the report of the start: the layout, and what computes the parts of a module.
_LAYOUT, _PARTS, _BACKEND, TRANSFORMERS = "batch", "modules", "backend", "transformers"
# All layers together may differ by this many times the tolerance of one operation.
_ROUNDING_FACTOR = 4
# The tolerance of one product in 8 bits.
_INT8_TOLERANCE = 3e-2
# The tokens of the trial's texts. Some are padded beside others, and two have the same length. One
# more, or two that are padded, are longer than most windows and the blocks of windowed attention.
_TRIAL_LENGTHS = (3, 15, 17, 19, 19)
_LONG_TRIAL, _LONGEST_TRIAL = 40, 700
# Fields of a configuration after whose number of tokens attention or a recurrence changes.
_WINDOWS = re.compile(r"window|chunk|block_size|topk|budget")
# Of attention to the keys of the highest scores: which of equal ones it takes depends on padding.
_KEY_COUNTS = ("index_topk", "index_topk_blocks", "indexer_budget", "keep_window_size")
# A range of ids that every vocabulary has.
_TRIAL_IDS = (5, 100)
# One of these ids, to test that the padding's id does not matter.
_OTHER_PADDING = 7
# Attention's memory is measured with texts of this many tokens, twice and three times as many.
_MEASURED_TOKENS = 16
# The number of positions of a model that has no limit.
_UNLIMITED = 2**31
# Added to the positions of the second text of a pair, by which a classifier's tokens are marked.
_SECOND_SEGMENT = 2**32


def load_by_transformers(
    folder: Path,
    target: Target,
    read_tokenizer: Callable[[int], TextTokenizer],
    *,
    classifies: Classified | None = None,
    marks_segments: bool = False,
) -> tuple[Backbone, TextTokenizer]:
    """Load the transformer in `folder` and its tokenizer, for the module's number of positions.

    With `classifies` it is loaded with its head, as a `Classifier`. Raises `StartupError` if
    transformers cannot load it.
    """

    def load() -> Any:
        module = load_module(folder, target, classifies=classifies)
        return Classifier(module, marks_segments=marks_segments) if classifies else module

    try:
        return _load(folder, target, read_tokenizer, load)
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(
            f"transformers cannot load the model in {folder}: {one_line(error):.300}"
        ) from error


def _load(
    folder: Path,
    target: Target,
    read_tokenizer: Callable[[int], TextTokenizer],
    load: Callable[[], Any],
) -> tuple[Backbone, TextTokenizer]:
    module, whole = load(), read_config(folder)
    is_part = "text_config" in whole
    count = _count_positions(module, is_part=is_part)
    tokenizer = read_tokenizer(count)
    tables = (part for part in module.modules() if isinstance(part, nn.Embedding))
    in_tables = sum(table.weight.numel() for table in tables)
    parameters = sum(parameter.numel() for parameter in module.parameters()) - in_tables
    if is_part and not isinstance(module, TextTower):
        log.warning(
            "only_texts_read",
            model=folder.name,
            detail=f"a model of type {whole['model_type']} also reads other inputs than texts: its "
            "text part is served, and pictures and sound are not read",
        )
    trial = _Trial(folder, load, module, target, tokenizer, count=count)
    configuration = describe_config(module)
    del module  # The trial may load it again.
    transformer, target = trial.choose()
    backbone = Backbone(
        transformer,
        target,
        hidden_size=trial.hidden_size,
        max_length=count,
        parameters=parameters,
        positions=trial.positions,
        configuration=configuration,
        encode_images=trial.encode_images,
    )
    return backbone, tokenizer


def _count_positions(module: Any, *, is_part: bool) -> int:
    """Return the number of positions, without those that RoBERTa's families never use.

    The limit in the configuration of a part is not applied to rotary positions, which have none:
    EmbeddingGemma 2 was published with 1,024 there, and reads 8,192 tokens.
    """
    for name, table in module.named_modules():
        if isinstance(table, nn.Embedding) and name.endswith("position_embeddings"):
            return table.num_embeddings - (
                0 if table.padding_idx is None else table.padding_idx + 1
            )
    if is_part and any(name.endswith("rotary_emb") for name, _ in module.named_modules()):
        return _UNLIMITED
    limit: Any = getattr(module.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else _UNLIMITED


class PackedModule(Transformer):
    """A module that computes packed texts, with `attend` in place of its own attention."""

    def __init__(self, module: nn.Module, attend: Attention) -> None:
        self._module = module
        self._attend = attend
        self.window = getattr(module.config, "sliding_window", None)
        # If the kernel has no window, the texts are divided by their lengths, and a captured graph
        # would use those of its own batch for all others.
        self.capturable = self.window is None or has_window(attend)

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`."""
        states: Tensor = self._module(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            packed_attention=PackedAttention(self._attend, packed),
        ).last_hidden_state[0]
        return states if rows is None else states.index_select(0, rows)

    def without_unattended(self) -> Self:
        """Implement `Transformer`."""
        changed = copy(self)
        changed._attend = exclude_unattended(self._attend)  # noqa: SLF001 - a copy
        return changed


class PaddedModule(Transformer):
    """A module that computes groups of texts, in one of the layouts with padding or without.

    `padding` is the id of the padding token, by default the model's. `bytes_per_pair` is the memory
    of attention for each pair of tokens of a text, if it is quadratic.
    """

    capturable = rounds_up = False

    def __init__(self, module: Any, layout: str, padding: int | None = None) -> None:
        self._module = module
        self._layout = layout
        default: int | None = getattr(module.config, "pad_token_id", None)
        self._padding = (default or 0) if padding is None else padding
        self.bytes_per_pair = 0.0

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`.

        Raises `OutOfMemoryError` for a text whose attention does not fit the free memory of a CPU.
        """
        self._require_memory(packed)
        states = torch.cat(list(self._compute_groups(packed)))
        return states if rows is None else states.index_select(0, rows)

    def without_unattended(self) -> Self:
        """Implement `Transformer`; the mask of a group hides unattended tokens."""
        return self

    def _compute_groups(self, packed: PackedBatch) -> Iterator[Tensor]:
        """Yield the states of each group of sequences, computed with padding, in packed order."""
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        ids = torch.split(packed.input_ids[0], packed.lengths)
        attended = torch.split(packed.attended, packed.lengths)
        max_pairs = _GROUP_BYTES / self.bytes_per_pair if self.bytes_per_pair else math.inf
        if self._layout == ALONE:
            max_pairs = 0.0
        for group in group_for_padding(packed.lengths, _MAX_PADDING[self._layout], max_pairs):
            input_ids = pad(list(ids[group]), padding_value=float(self._padding))
            is_token = np.arange(input_ids.shape[1]) < np.array(packed.lengths[group])[:, None]
            mask = pad(list(attended[group])).long()
            options = {"attention_mask": mask}
            if getattr(self._module, "marks_segments", False):
                is_second = torch.split(packed.position_ids[0] >= _SECOND_SEGMENT, packed.lengths)
                options["token_type_ids"] = pad(list(is_second[group])).long()
            output = self._module(input_ids=input_ids, **options)
            # A boolean index on the device would make this thread wait for the device.
            slots = to_device(packed.device, np.flatnonzero(is_token))
            yield output.last_hidden_state.flatten(0, 1).index_select(0, slots)

    def _require_memory(self, packed: PackedBatch) -> None:
        """Refuse a text whose attention does not fit a CPU's memory: the system would kill us."""
        needed = packed.max_length**2 * self.bytes_per_pair
        if packed.device.type != "cpu" or needed <= _GROUP_BYTES:
            return
        usage = memory_usage(packed.device)
        available = _FREE_SHARE * (usage.total - usage.used)
        if needed > available:
            raise OutOfMemoryError(
                f"attention over a text of {packed.max_length} tokens takes {needed / 2**30:.1f} "
                f"GiB in this model, and {max(0.0, available) / 2**30:.1f} GiB are available; send "
                "shorter texts, or lower max_tokens or EMBED_MAX_LENGTH",
                retry_after=_RETRY_AFTER,
            )


class _Trial:
    """Random texts, for which ways to compute a batch are compared with each text alone."""

    def __init__(
        self,
        folder: Path,
        load: Callable[[], Any],
        module: Any,
        target: Target,
        tokenizer: TextTokenizer,
        *,
        count: int,
    ) -> None:
        self._folder, self._target, self._count = folder, target, count
        self._load, self._module = load, module
        self._described = f"the model in {folder}, of type {module.config.model_type},"
        own = module.config._attn_implementation  # noqa: SLF001 - it has no public name
        self._own_attention: str = own or "eager"
        self._classifies = isinstance(module, Classifier)
        # Some classifiers read the state of the token that ends a text.
        self._ending = np.zeros(0, np.int64)
        if isinstance(module, TextTower):
            self._ending = np.array([token.id for token in tokenizer.special_tokens[1]], np.int64)
        self.positions = PositionScheme()
        if self._classifies:
            self._ending = tokenizer.pair_template()[-1]
            self.positions = PositionScheme(
                segment_offset=_SECOND_SEGMENT if module.marks_segments else 0
            )
        self._pack = partial(pack, device=target.device, positions=self.positions)
        fields = module.config.to_dict().items()
        windows = [size for name, size in fields if _WINDOWS.search(name)]
        windows.append(_read_option(module.config, "sliding_window"))  # Of ModernBERT no field.
        window = max((size for size in windows if type(size) is int), default=0)
        longest = min(_LONGEST_TRIAL, 2 * window + _LONG_TRIAL)
        # A packed text has no padding.
        padded = [] if module.config.model_type in PACKED_TYPES else [longest * 7 // 8]
        texts, others = self._draw_texts((*_TRIAL_LENGTHS, *padded, longest))
        self._texts = self._pack(texts)
        # The same lengths, but every second text is reversed.
        self._beside_others = self._pack(others)
        kept = np.concatenate([np.full(len(ids), i % 2 == 1) for i, ids in enumerate(texts)])
        self._kept = to_device(target.device, np.flatnonzero(kept))
        self._calibration = encode_calibration(tokenizer) if target.quantized else []
        self._longest = tokenizer.max_length
        self._refused: list[Proof] = []
        self._compute_alone()

    def _draw_texts(self, lengths: tuple[int, ...]) -> tuple[list[TokenIds], list[TokenIds]]:
        """Draw texts of these lengths, and the same ones with every second text reversed."""
        random, ending = np.random.default_rng(0), self._ending
        texts = [
            random.integers(*_TRIAL_IDS, min(length, self._count)) for length in sorted(lengths)
        ]
        # A head that needs as many ending tokens in each text of a batch does not get batches.
        for text in texts[1::2] if self._classifies else ():
            text[: len(ending)] = ending[: len(text)]
        others = [ids[::-1].copy() if i % 2 == 0 else ids for i, ids in enumerate(texts)]
        for text in (*texts, *others):
            text[max(0, len(text) - len(ending)) :] = ending[-len(text) :]
            if self.positions.segment_offset:
                text[len(text) // 2 :] |= SECOND_SEGMENT
        return texts, others

    @torch.inference_mode()
    def _compute_alone(self) -> None:
        """Compute the states of each text alone; raises `StartupError` if they are unusable."""
        alone = PaddedModule(self._module, ALONE)
        try:
            self._expected = alone(self._texts)
        except Exception as error:
            raise cannot_compute_error(self._described, error) from error
        self.hidden_size = self._expected.shape[1]
        if not self._expected.cpu().isfinite().any():
            raise never_finite_error(f"in {self._folder}")
        is_bidirectional = getattr(self._module.config, "is_causal", None) is False
        if is_bidirectional and self._count > 1 and not self._classifies:
            texts = self._pack([np.array([5, 6])]), self._pack([np.array([5, 7])])
            first, other = (alone(text)[0] for text in texts)
            if torch.equal(first, other):
                raise StartupError(
                    f"{self._described} attends in both directions by its configuration, but "
                    "transformers computes it as causal"
                )
        if self._calibration:
            self._exact = alone(self._pack(self._calibration))

    @property
    def encode_images(self) -> Callable[..., tuple[Tensor, int]] | None:
        """The method of the chosen module that computes pictures, if it reads them."""
        return self._module.encode_images if isinstance(self._module, TextTower) else None

    @torch.inference_mode()
    def choose(self) -> tuple[Transformer, Target]:
        """Return the fastest way to compute texts as if each was alone, and its target.

        Raises `StartupError` if there is none.
        """
        config, layouts, found = self._module.config, [PADDED, ONE_LENGTH, ALONE], None
        selects_keys = any(_read_option(config, name) for name in _KEY_COUNTS)
        if selects_keys or _rotary_kinds(config) & _KINDS_BY_LONGEST:
            layouts.remove(PADDED)
        elif config.model_type in PACKED_TYPES and not self._classifies:
            found = self._try(_BACKEND, [PACKED])
        if self._target.attention_named and not found:
            raise StartupError(
                f"the model in {self._folder} has its own attention, which no other can replace; "
                "set ATTENTION to auto"
            )
        found = found or self._try(_BACKEND, layouts)
        if self._target.quantized and not found:
            failed = self._refused[-1]
            reason = ": ".join(filter(None, (failed.reason, failed.message)))
            raise StartupError(
                f"{self._described} is not computed in 8 bits ({reason}); set DTYPE to auto"
            )
        found = found or self._try(TRANSFORMERS, layouts)
        if not found:
            raise StartupError(
                f"{self._described} computes different vectors for the same text each time "
                f"({self._refused[-1].reason})"
            )
        return found

    def _try(self, parts: str, layouts: list[str]) -> tuple[Transformer, Target] | None:
        """Return the first layout that holds if `parts` computes the module's parts, or None."""
        if self._refused:  # The module's parts were replaced.
            self._module = self._load()
        refused, packs = list[Proof](), layouts == [PACKED]
        try:
            make, target = self._prepare(parts, packs=packs)
            for layout in layouts:
                proof = self._prove(layout, make)
                if proof.holds:
                    target = target.with_path(_LAYOUT, layout, refused)
                    target = replace(target, refused=(*self._refused, *target.refused))
                    return self._finish(make(layout)), target
                refused.append(proof)
        except StartupError:
            raise
        except Exception as error:  # noqa: BLE001 - after any error, the next way is tried
            error_name = type(error).__name__
            refused.append(Proof("forward", PACKED, math.inf, 0.0, error_name, one_line(error)))
        failed = refused[-1]
        if not packs:
            failed = replace(failed, operation=_PARTS, path=parts)
        log_refused_paths([failed], PADDED if packs else TRANSFORMERS)
        self._refused.append(failed)
        return None

    def _prepare(self, parts: str, *, packs: bool) -> tuple[Callable[..., Transformer], Target]:
        """Replace parts of the module; return how to make its transformer of a layout."""
        module, target = self._module, self._target
        if parts == TRANSFORMERS:
            return partial(PaddedModule, module), target.with_path(ATTENTION, self._own_attention)
        if packs:
            AttentionInterface.register(_PACKED_ATTENTION, attend_packed)
            module.set_attn_implementation(_PACKED_ATTENTION)
        body = module.body if isinstance(module, Classifier | TextTower) else module
        replaced = find_parts(body, target.dtype, packed=packs)
        operations = sorted({name for part in replaced for name in part.operations})
        shapes = _read_shapes(module, self.hidden_size)
        target = prove(target, shapes, [ATTENTION, *operations] if packs else operations)
        make: Callable[..., Transformer] = partial(PaddedModule, module)
        if packs:
            attend = target.backend.attention
            make = lambda *_: PackedModule(module, attend)  # noqa: E731 - has the other's arguments
        else:
            target = target.with_path(ATTENTION, self._own_attention)
        if not target.quantized:
            replace_parts(replaced, target.backend)
            return make, target
        # One call calibrates all texts; a module that is not packed gets them as one text.
        texts = self._calibration if packs else [np.concatenate(self._calibration)[: self._longest]]
        with calibrating_backend(target.backend, target.dtype) as int8_backend:
            replace_parts(replaced, int8_backend)
            for parameter in module.parameters():
                parameter.data = parameter.data.to(target.dtype)
            make(ALONE)(self._pack(texts))
        return make, target

    def _prove(self, layout: str, make: Callable[..., Transformer]) -> Proof:
        """Compare a layout with each text alone, and then with itself beside other texts.

        The second comparison is between equal shapes, so its tolerance is that of one operation:
        even in half precision it finds a small influence of padding or neighbours.
        """
        tolerance = TOLERANCES[self._target.dtype]
        rounding = _ROUNDING_FACTOR * (_INT8_TOLERANCE if self._target.quantized else tolerance)
        states: list[Tensor] = []

        def compute() -> list[Tensor]:
            states.append(make(layout)(self._texts))
            return states

        def compute_beside_others() -> list[Tensor]:
            # Classifiers of decoders find the end of a text by the padding's id.
            padding = None if self._classifies else _OTHER_PADDING
            others = make(layout, padding)(self._beside_others)
            return [others.index_select(0, self._kept)]

        proof = try_path("forward", layout, compute, [self._expected], rounding)
        if not proof.holds:
            return proof
        kept = [states[0].index_select(0, self._kept)]
        return try_path("forward", layout, compute_beside_others, kept, tolerance)

    def _finish(self, transformer: Transformer) -> Transformer:
        """Measure the attention's memory; log a warning if vectors in 8 bits are inexact."""
        if isinstance(transformer, PaddedModule):
            transformer.bytes_per_pair = _measure_bytes_per_pair(
                self._module, self._count, self._target.device, self._ending
            )
        if self._calibration:
            texts = self._pack(self._calibration)
            warn_if_inexact(self._folder.name, transformer(texts), self._exact, texts)
        return transformer


def _rotary_kinds(config: Any) -> set[str]:
    rotary = _read_option(config, "rope_parameters") or {}
    # The parameters of all layers, or those of each kind of layer.
    options = (rotary, *rotary.values())
    return {str(option.get("rope_type")) for option in options if isinstance(option, dict)}


def _read_option(holder: Any, name: str) -> Any:
    """Return a value of a configuration, or None if there is none, or one for each layer."""
    try:
        return getattr(holder, name, None)
    except RuntimeError:
        return None


def _read_shapes(module: Any, width: int) -> Shapes:
    """Return sizes for the proof of operations; `width` is that of the states."""

    def size(name: str, default: int) -> int:
        value = _read_option(module.config, name)
        return value if isinstance(value, int) and value else default

    width = size("hidden_size", width)
    heads = size("num_attention_heads", 1)
    return Shapes(
        width,
        size("intermediate_size", width),
        heads,
        size("num_key_value_heads", heads),
        size("head_dim", width // heads),
        bias=False,
        causal=any(getattr(part, "is_causal", False) for part in module.modules()),
    )


class _LiveBytes(TorchFunctionMode):
    """Records, after each operation, the bytes of the results that are still in memory."""

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
        for leaf in tree_leaves(result):
            # Tensors within `vmap`, which makes masks, are parts of its result, which counts once.
            if isinstance(leaf, Tensor) and not is_batchedtensor(leaf):
                storage = leaf.untyped_storage()
                if id(storage) not in self._sizes:
                    weakref.finalize(storage, self._sizes.pop, id(storage))
                self._sizes[id(storage)] = storage.nbytes()
        self.after.append(sum(self._sizes.values()))
        return result


@torch.inference_mode()
def _measure_bytes_per_pair(
    module: Any, positions: int, device: torch.device, ending: TokenIds
) -> float:
    """Return the memory that a forward takes for each pair of tokens of a text, in bytes.

    After each operation the memory in use is a quadratic polynomial of the number of tokens. Texts
    of three lengths determine the factor of its square, which is 0 if no memory is quadratic.
    """
    step = max(1, min(_MEASURED_TOKENS, positions // 3))
    counts: list[list[int]] = []
    for length in (step, 2 * step, 3 * step):
        with _LiveBytes() as live:
            ids = torch.full((1, length), _OTHER_PADDING, device=device)
            ids[0, length - min(length, len(ending)) :] = to_device(device, ending[-length:])
            module(input_ids=ids, attention_mask=torch.ones_like(ids))
        counts.append(live.after)
    if len({len(count) for count in counts}) > 1:  # Longer texts take other operations.
        counts = [[max(count)] for count in counts]
    squares = [
        (third - 2 * second + first) / 2 for first, second, third in zip(*counts, strict=True)
    ]
    return float(max(0.0, *squares) / step**2)
