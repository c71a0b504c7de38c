"""Encoders of families without an implementation here, computed by transformers' modules.

After a module is loaded, a trial runs it with each layout of a batch, the fastest (packed) first.
The first layout in which each text has the same states as alone is used. A checkpoint's code is
never run.
"""

import inspect
import math
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import structlog
import torch
import transformers
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
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
from smart_embedder.models.files.config import read_config, unusable_value
from smart_embedder.models.files.record import current_record
from smart_embedder.models.files.weights import StoredTensor, Weights
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.tokens import TokenIds

log = structlog.get_logger(__name__)

# The most parameters of a module, relative to the stored numbers: it may also have an unused
# pooler, and tables that it computes.
_MAX_PARAMETERS = 1.5
# The names of tensors for other inputs than texts.
_OTHER_INPUTS = r"(vision|visual|image|audio|sound|speech|video|multi_modal|mm_projector)"
# The most layers of a model whose layers share their tensors.
_MAX_LAYERS = 100
# The layouts of the texts of a batch, the fastest first.
PACKED, PADDED, ONE_LENGTH, ALONE = "packed", "padded", "one_length", "alone"
_PACKED = "smart_embedder_packed"
# The most padding of a group that is computed together, as a share of its tokens.
_MAX_PADDING = {PADDED: 0.25, ONE_LENGTH: 0.0, ALONE: 0.0}
# The most memory of attention for a group of several texts, and for a single text on a CPU before
# the free memory is checked. Then a text may take this share of it, as others need memory, too.
_GROUP_BYTES = 2**28
_FREE_SHARE = 0.5
_RETRY_AFTER = 30
_LAYOUT = "batch"
# Names in the report of the start: the proof of replaced parts, and the two that can compute them.
_PARTS, _BACKEND, TRANSFORMERS = "modules", "backend", "transformers"
# All layers together may differ by this many times the tolerance of one operation.
_ROUNDING_FACTOR = 4
# The tolerance of one product in 8 bits.
_INT8_TOLERANCE = 3e-2
# The tokens of the trial's texts. Some are padded beside others, two have the same length, and one
# is longer than the window and than the blocks of windowed attention.
_TRIAL_LENGTHS = (3, 15, 17, 19, 19, 40)
_LONGEST_TRIAL = 700
_WIDEST_TRIAL = (_LONGEST_TRIAL - 9) // 2
# Attributes, of configurations and of attentions, that limit how far a token attends.
_WINDOWS = ("sliding_window", "attention_chunk_size")
# The number of tokens above which rotary positions change (`longrope`). In the trial, some of the
# texts that are padded together are longer than this number, and some are not.
_LONGROPE_FROM, _TRIAL_LONGROPE_FROM = "original_max_position_embeddings", 16
# A range of ids that every vocabulary has.
_TRIAL_IDS = (5, 100)
# One of these ids, to test that the padding's id does not matter.
_OTHER_PADDING = 7
# Attention's memory is measured with texts of this many tokens, twice and three times as many.
_MEASURED_TOKENS = 16
# Options of a configuration that do not change a text's states.
_WITHOUT_EFFECT = {
    "_name_or_path", "architectures", "auto_map", "dtype", "id2label", "label2id", "num_labels",
    "problem_type", "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip
# The number of positions of a model that has no limit.
_UNLIMITED = 2**31
# Added to the positions of the second text of a pair, by which a classifier's tokens are marked.
_SECOND_SEGMENT = 2**32


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


def load_by_transformers(
    folder: Path,
    target: Target,
    read_tokenizer: Callable[[int], TextTokenizer],
    *,
    classifies: bool = False,
    marks_segments: bool = False,
) -> tuple[Backbone, TextTokenizer]:
    """Load the transformer in `folder` and its tokenizer, for the module's number of positions.

    With `classifies` it is loaded with its head, as a `Classifier`. Raises `StartupError` if
    transformers cannot load it.
    """

    def load_module() -> Any:
        module = _load_module(folder, target, classifies=classifies)
        return Classifier(module, marks_segments=marks_segments) if classifies else module

    try:
        return _load(folder, target, read_tokenizer, load_module)
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(
            f"transformers cannot compute the model in {folder}: {_one_line(error)}"
        ) from error


def _load(
    folder: Path,
    target: Target,
    read_tokenizer: Callable[[int], TextTokenizer],
    load_module: Callable[[], Any],
) -> tuple[Backbone, TextTokenizer]:
    module = load_module()
    count, positions = _find_positions(module)
    tokenizer = read_tokenizer(count)
    ending = np.zeros(0, np.int64)
    if isinstance(module, Classifier):
        # Some read the state of the token that ends a text.
        ending = tokenizer.pair_template()[-1]
        positions = replace(
            positions, segment_offset=_SECOND_SEGMENT if module.marks_segments else 0
        )
    tables = (part for part in module.modules() if isinstance(part, nn.Embedding))
    in_tables = sum(table.weight.numel() for table in tables)
    parameters = sum(parameter.numel() for parameter in module.parameters()) - in_tables
    with _lower_limits(module):
        trial = _Trial(
            folder, load_module, module, target, count=count, positions=positions, ending=ending
        )
        target = trial.choose_layout()
    target = trial.quantize(target, tokenizer) if target.quantized else trial.use_backend(target)
    transformer = trial.transformer(target)
    if transformer.attend is None:
        transformer.bytes_per_pair = _measure_bytes_per_pair(
            trial.module, count, target.device, ending
        )
    backbone = Backbone(
        transformer,
        target,
        hidden_size=trial.hidden_size,
        max_length=count,
        parameters=parameters,
        positions=positions,
        # Without defaults and options that do not change the states.
        configuration=sorted(
            (name, repr(value))
            for name, value in module.config.to_diff_dict().items()
            if name not in _WITHOUT_EFFECT
        ),
    )
    return backbone, tokenizer


def _find_positions(module: Any) -> tuple[int, PositionScheme]:
    """Return the number of positions, and how they are counted."""
    for name, table in module.named_modules():
        if isinstance(table, nn.Embedding) and name.endswith("position_embeddings"):
            padding = table.padding_idx
            unused = 0 if padding is None else padding + 1
            return table.num_embeddings - unused, PositionScheme(padding)
    limit: Any = getattr(module.config, "max_position_embeddings", None)
    is_limit = isinstance(limit, int) and limit > 0
    return limit if is_limit else _UNLIMITED, PositionScheme()


def _load_module(folder: Path, target: Target, *, classifies: bool) -> Any:
    """Load the module in `folder`, with a head only if it `classifies`, on its device.

    Raises `StartupError` if it cannot be loaded or lacks tensors.
    """
    _require_supported(folder)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, report = _from_pretrained(folder, target, classifies=classifies)
    except StartupError:
        raise
    except Exception as error:
        reason = _one_line(error)
        raise StartupError(f"transformers cannot load the model in {folder}: {reason}") from error
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
    config = _read_text_part(folder)
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
                f"{folder} holds a model of type {config.model_type}, of which transformers "
                f"{transformers.__version__} has no classifier"
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
        state_dict=dict(_named_tensors(weights, described)),
        dtype=torch.float32 if target.quantized else target.dtype,
        output_loading_info=True,
        local_files_only=True,
    )
    if (record := current_record()) is not None:
        record.read_all_fields(folder / "config.json")
        record.leave_out(loaded[0]._keys_to_ignore_on_load_unexpected or ())  # noqa: SLF001
    return loaded


def _read_text_part(folder: Path) -> Any:
    """Read the configuration, or that of the text part of a model that also reads other inputs."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text = getattr(config, "text_config", None)
    if text is None:
        return config
    if hasattr(config, "logit_scale_init_value"):
        raise StartupError(
            f"{folder} holds a model of type {config.model_type}, which projects texts and images "
            "into one space; such projections are not supported"
        )
    log.warning(
        "only_texts_read",
        model=folder.name,
        detail=f"a model of type {config.model_type} also reads other inputs than texts: its text "
        "part is served, and pictures and sound are not read",
    )
    if (record := current_record()) is not None:
        record.leave_out([_OTHER_INPUTS])
    return text


def _named_tensors(weights: Weights, described: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of the described part; their contents are hashed under its names.

    The hash leaves out the pooler, which is not computed, and whole numbers.
    """
    names, base = set(described.state_dict()), f"{described.base_model_prefix}."
    # How often each prefix stands before a name of the part.
    prefixes = Counter(
        stored_name[:start]
        for stored_name in weights.tensors
        for start in (0, *(dot.end() for dot in re.finditer(r"\.", stored_name)))
        if stored_name[start:] in names
    )
    prefix = max(prefixes, key=prefixes.__getitem__, default="")
    # transformers knows its own prefix, and renames tensors of older versions by it.
    prefix = "" if prefix == base else prefix
    for stored_name, tensor in weights.tensors.items():
        if stored_name.startswith(prefix):
            kept_name = stored_name.removeprefix(prefix)
            name = kept_name.removeprefix(base)
            is_read = "pooler" not in name or kept_name in names
            is_hashed = is_read and tensor.dtype.is_floating_point
            yield kept_name, replace(tensor, hashed_as=name if is_hashed else None)


class ModuleTransformer(Transformer):
    """A transformers module that gets its batches in a `layout`; the packed one needs `attend`.

    `padding` is the id of the padding token, by default the model's. `bytes_per_pair` is the memory
    of attention for each pair of tokens of a text, if it is quadratic.
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
        default: int | None = getattr(module.config, "pad_token_id", None)
        self._padding = (default or 0) if padding is None else padding
        self.bytes_per_pair = 0.0
        self.rounds_up = layout == PACKED
        self.window = _read_option(module.config, "sliding_window")
        # If the kernel has no window, the texts are divided by their lengths, and a captured graph
        # would use those of its own batch for all others.
        self.capturable = attend is not None and (self.window is None or has_window(attend))

    def __call__(self, packed: PackedBatch, rows: Tensor | None = None) -> Tensor:
        """Implement `Transformer`.

        Raises `OutOfMemoryError` for a text whose attention does not fit the free memory of a CPU.
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
        """Yield the states of each group of sequences, computed with padding, in packed order."""
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

    def without_unattended(self) -> Self:
        """Implement `Transformer`; a padded batch hides unattended tokens by its mask."""
        changed = copy(self)
        if self.attend is not None:
            changed.attend = exclude_unattended(self.attend)
        return changed


class _Trial:
    """Random texts, for which layouts of batches are compared with each text alone.

    Run it within `_lower_limits`, so that some texts are longer than the module's limits.
    """

    def __init__(
        self,
        folder: Path,
        load_module: Callable[[], Any],
        module: Any,
        target: Target,
        *,
        count: int,
        positions: PositionScheme,
        ending: TokenIds,
    ) -> None:
        self._load_module = load_module
        self._described = f"the model in {folder}, of type {read_config(folder).get('model_type')},"
        self._folder = folder
        self.module = module
        self._target = target
        window = _read_option(module.config, "sliding_window") or 0
        lengths = (*_TRIAL_LENGTHS, min(_LONGEST_TRIAL, 2 * window + 9))
        random = np.random.default_rng(0)
        texts = [random.integers(*_TRIAL_IDS, min(length, count)) for length in sorted(lengths)]
        # A head that needs as many ending tokens in each text of a batch does not get batches.
        for text in texts[1::2]:
            text[: len(ending)] = ending[: len(text)]
        others = [ids[::-1].copy() if i % 2 == 0 else ids for i, ids in enumerate(texts)]
        for text in (*texts, *others):
            text[max(0, len(text) - len(ending)) :] = ending[-len(text) :]
            if positions.segment_offset:
                text[len(text) // 2 :] |= SECOND_SEGMENT
        self._pack = partial(pack, device=target.device, positions=positions)
        self._texts = self._pack(texts)
        # The same lengths, but every second text is reversed.
        self._beside_others = self._pack(others)
        kept = np.concatenate([np.full(len(ids), i % 2 == 1) for i, ids in enumerate(texts)])
        self._kept = to_device(target.device, np.flatnonzero(kept))

    @torch.inference_mode()
    def choose_layout(self) -> Target:
        """Return the target with the first layout that computes texts as if they were alone.

        Raises `StartupError` if there is none.
        """
        module, target = self.module, self._target
        own_attention = module.config._attn_implementation  # noqa: SLF001 - it has no public name
        try:
            self._expected = ModuleTransformer(module, ALONE)(self._texts)
        except Exception as error:
            raise StartupError(
                f"{self._described} cannot compute a text that is alone in its batch: "
                f"{_one_line(error)}"
            ) from error
        self.hidden_size = self._expected.shape[1]
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
                f"the model in {self._folder} has its own attention, which no other can replace; "
                "set ATTENTION to auto"
            )
        for layout in (PADDED, ONE_LENGTH, ALONE):
            proof = self._prove_layout(layout)
            if proof.holds:
                target = target.with_path(ATTENTION, own_attention or "eager")
                return target.with_path(_LAYOUT, layout, refused)
            refused.append(proof)
        raise StartupError(
            f"{self._described} computes different vectors for the same text each time "
            f"({refused[-1].reason})"
        )

    def transformer(self, target: Target) -> ModuleTransformer:
        """Make a transformer of the module, as it is now, in the layout of a target."""
        layout = target.paths[_LAYOUT]
        attend = target.backend.attention if layout == PACKED else None
        return ModuleTransformer(self.module, layout, attend)

    @torch.inference_mode()
    def use_backend(self, target: Target) -> Target:
        """Replace parts of the module by the backend's; undo that if the states change."""
        proven, parts = self._prove_parts(target)
        replace_parts(parts, proven.backend)
        proof = self._prove_replaced_parts(proven)
        if proof.holds:
            return proven
        log_refused_paths([proof], TRANSFORMERS)
        self.module = self._load_module()
        if target.paths[_LAYOUT] == PACKED:
            _use_packed_attention(self.module)
        return replace(target, refused=(*target.refused, proof))

    @torch.inference_mode()
    def quantize(self, target: Target, tokenizer: TextTokenizer) -> Target:
        """Replace the products by products in 8 bits, calibrated with some texts.

        Raises `StartupError` if the module cannot be computed so.
        """
        texts = encode_calibration(tokenizer)
        packed = self._pack(texts)
        exact = self.transformer(target)(packed)
        target, parts = self._prove_parts(target)
        transformer = self.transformer(target)
        # One call calibrates all texts; layouts that are not packed get them joined as one text.
        joined = np.concatenate(texts)[: tokenizer.max_length]
        try:
            with calibrating_backend(target.backend, target.dtype) as int8_backend:
                replace_parts(parts, int8_backend)
                for parameter in self.module.parameters():
                    parameter.data = parameter.data.to(target.dtype)
                transformer(packed if transformer.layout == PACKED else self._pack([joined]))
        except Exception as error:
            raise StartupError(
                f"{self._described} is not computed in 8 bits: {_one_line(error)}; set DTYPE to "
                "auto"
            ) from error
        proof = self._prove_replaced_parts(target)
        if not proof.holds:
            raise StartupError(
                f"{self._described} is not computed in 8 bits correctly ({proof.reason}); set "
                "DTYPE to auto"
            )
        warn_if_inexact(self._folder.name, transformer(packed), exact, packed)
        return target

    def _prove_parts(self, target: Target) -> tuple[Target, list[Replacement]]:
        """Find the parts that can be replaced, and prove the operations that they need."""
        body = self.module.body if isinstance(self.module, Classifier) else self.module
        parts = find_parts(body, target.dtype, packed=target.paths[_LAYOUT] == PACKED)
        operations = {name for part in parts for name in part.operations}
        return prove(target, _read_shapes(self.module), sorted(operations)), parts

    def _prove_replaced_parts(self, target: Target) -> Proof:
        with _lower_limits(self.module):
            transformer = self.transformer(target)
            proof = self._prove_layout(transformer.layout, transformer.attend)
        return replace(proof, operation=_PARTS, path=_BACKEND)

    def _prove_layout(self, layout: str, attend: Attention | None = None) -> Proof:
        """Compare a layout with each text alone, and then with itself beside other texts.

        The second comparison is between equal shapes, so its tolerance is that of one operation:
        even in half precision it finds a small influence of padding or neighbours.
        """
        tolerance = TOLERANCES[self._target.dtype]
        rounding = _ROUNDING_FACTOR * (_INT8_TOLERANCE if self._target.quantized else tolerance)
        states: list[Tensor] = []

        def compute() -> list[Tensor]:
            states.append(ModuleTransformer(self.module, layout, attend)(self._texts))
            return states

        def compute_beside_others() -> list[Tensor]:
            # Classifiers of decoders find the end of a text by the padding's id.
            padding = None if isinstance(self.module, Classifier) else _OTHER_PADDING
            transformer = ModuleTransformer(self.module, layout, attend, padding)
            return [transformer(self._beside_others).index_select(0, self._kept)]

        proof = try_path("forward", layout, compute, [self._expected], rounding)
        if not proof.holds:
            return proof
        kept = [states[0].index_select(0, self._kept)]
        return try_path("forward", layout, compute_beside_others, kept, tolerance)


def _one_line(error: Exception) -> str:
    return " ".join((str(error) or type(error).__name__).split())


def _use_packed_attention(module: Any) -> None:
    """Let a module compute packed attention."""
    AttentionInterface.register(_PACKED, attend_packed)
    module.set_attn_implementation(_PACKED)


def _read_option(holder: Any, name: str) -> Any:
    """Return a value of a configuration, or None if there is none, or one for each layer."""
    try:
        return getattr(holder, name, None)
    except RuntimeError:
        return None


def _read_shapes(module: Any) -> Shapes:
    """Return sizes for the proof of operations; options with a value for each layer have none."""
    read = partial(_read_option, module.config)
    width, heads = module.config.hidden_size, read("num_attention_heads") or 1
    inner_width = read("intermediate_size")
    return Shapes(
        width,
        inner_width if isinstance(inner_width, int) else width,
        heads,
        read("num_key_value_heads") or heads,
        read("head_dim") or width // heads,
        bias=False,
        causal=any(getattr(part, "is_causal", False) for part in module.modules()),
    )


@contextmanager
def _lower_limits(module: Any) -> Iterator[None]:
    """Lower a module's limits, so that the trial's longest texts are computed as long texts.

    The limits are attention windows, and the number of tokens above which rotary positions change
    (`longrope`). Modules read them at each call, and compute a low limit as they do the real one.
    """
    window = _read_option(module.config, "sliding_window") or 0
    # All windows are lowered by the same number: some families' attentions add one to it.
    reduction = max(0, window - _WIDEST_TRIAL)
    parts = list(module.modules())
    configs = [part.config for part in parts if getattr(part, "config", None) is not None]
    with ExitStack() as restore:
        for holder in {id(holder): holder for holder in (*parts, *configs)}.values():
            for name in _WINDOWS:
                value = _read_option(holder, name)
                if isinstance(value, int) and value > _WIDEST_TRIAL:
                    narrowed = value - reduction if name == "sliding_window" else 0
                    restore.callback(setattr, holder, name, value)
                    setattr(holder, name, narrowed if narrowed > 0 else _WIDEST_TRIAL)
        for config in configs:
            rotary = getattr(config, "rope_parameters", None) or {}
            # The parameters of all layers, or those of each kind of layer.
            for options in (rotary, *rotary.values()):
                is_long = isinstance(options, dict) and options.get("rope_type") == "longrope"
                if is_long and _LONGROPE_FROM in options:
                    restore.callback(options.__setitem__, _LONGROPE_FROM, options[_LONGROPE_FROM])
                    options[_LONGROPE_FROM] = _TRIAL_LONGROPE_FROM
        yield


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
