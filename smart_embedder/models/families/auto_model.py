"""Encoders of families without an implementation here, computed by transformers' modules.

A module's forward runs on groups of texts of near lengths with padding, if a trial at the start
finds that each text then has the same states as alone; else on groups of one length, or on each
text alone. The types in `PACKED_TYPES` run on packed texts, with linear layers, norms and attention
by the backend, and if anything goes wrong in that trial, they run as all others do. If anything
goes wrong there, the start ends with one sentence.
"""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from smart_embedder.errors import StartupError, one_line
from smart_embedder.hardware.transfer import never_finite_error
from smart_embedder.kernels.packed_batch import SECOND_SEGMENT, PositionScheme, pack, to_device
from smart_embedder.kernels.proof import TOLERANCES, prove, try_path
from smart_embedder.kernels.target import ATTENTION, Proof, Shapes, Target, log_refused_paths
from smart_embedder.models.families.backbone import Backbone, Transformer
from smart_embedder.models.families.int8 import (
    calibrating_backend,
    encode_calibration,
    warn_if_inexact,
)
from smart_embedder.models.families.module_heads import (
    Classified,
    Classifier,
    HeadedModule,
    TextTower,
    encode_message,
)
from smart_embedder.models.families.module_layouts import (
    ALONE,
    ONE_LENGTH,
    PACKED,
    PADDED,
    SECOND_SEGMENT_OFFSET,
    PackedModule,
    PaddedModule,
)
from smart_embedder.models.families.module_loading import (
    compute_states,
    describe_config,
    load_module,
)
from smart_embedder.models.families.module_parts import (
    PACKED_TYPES,
    attend_packed,
    find_parts,
    replace_parts,
)
from smart_embedder.models.files.config import read_config, reads_image_messages
from smart_embedder.models.tokenizer import NO_IDS, TextTokenizer
from smart_embedder.tokens import TokenIds

log = structlog.get_logger(__name__)

_PACKED_ATTENTION = "smart_embedder_packed"
# The kinds of rotary positions that depend on the longest text of a batch.
_KINDS_BY_LONGEST = {"dynamic", "longrope"}
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
# The number of positions of a model that has no limit.
_UNLIMITED = 2**31
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


def load_by_transformers(
    folder: Path,
    target: Target,
    read_tokenizer: Callable[[int], TextTokenizer],
    *,
    classifies: Classified | None = None,
    marks_segments: bool = False,
    load: Callable[[], tuple[Any, Any]] | None = None,
) -> tuple[Backbone, TextTokenizer]:
    """Load the transformer in `folder` and its tokenizer, for the module's number of positions.

    With `classifies` it is loaded with its head, as a `Classifier`. `load` does what `load_module`
    does, for a folder of another form. Raises `StartupError` if transformers cannot load it.
    """
    load = load or partial(
        load_module, folder, target, classifies=classifies, marks_segments=marks_segments
    )
    try:
        trial = _Trial(folder, target, load, read_tokenizer)
        return trial.make_backbone(), trial.tokenizer
    except StartupError:
        raise
    except Exception as error:
        raise StartupError(
            f"transformers cannot load the model in {folder}: {one_line(error):.300}"
        ) from error


def _count_positions(module: Any, *, is_part: bool) -> int:
    """Return the number of positions, without those that RoBERTa's families never use.

    The limit in the configuration of a part is not applied to rotary positions, which have none:
    EmbeddingGemma 2 was published with 1,024 there, and reads 8,192 tokens.
    """
    parts = dict(module.named_modules())
    for name, table in parts.items():
        if isinstance(table, nn.Embedding) and name.endswith("position_embeddings"):
            unused = 0 if table.padding_idx is None else table.padding_idx + 1
            return table.num_embeddings - unused
    if is_part and any(name.endswith("rotary_emb") for name in parts):
        return _UNLIMITED
    limit: Any = getattr(module.config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else _UNLIMITED


class _Trial:
    """Random texts, for which ways to compute a batch are compared with each text alone.

    `load` returns a model and the module in it that computes texts. The states to expect are those
    of the model.
    """

    def __init__(
        self,
        folder: Path,
        target: Target,
        load: Callable[[], tuple[Any, Any]],
        read_tokenizer: Callable[[int], TextTokenizer],
    ) -> None:
        self._folder, self._target, self._load = folder, target, load
        whole, module = load()
        self._module, self._is_part = module, whole is not module
        # The model around the module, if pictures are read by it.
        reads_images = reads_image_messages(folder) and not isinstance(module, Classifier)
        self._whole = whole if reads_images else None
        self._described = f"the model in {folder}, of type {whole.config.model_type},"
        is_part = "text_config" in (config := read_config(folder))
        if is_part and not (reads_images or isinstance(module, TextTower)):
            log.warning(
                "only_texts_read",
                model=folder.name,
                detail=f"a model of type {config['model_type']} also reads other inputs than "
                "texts: its text part is served, and pictures and sound are not read",
            )
        self._count = _count_positions(module, is_part=is_part)
        self.tokenizer = read_tokenizer(self._count)
        own = module.config._attn_implementation  # noqa: SLF001 - it has no public name
        self._own_attention: str = own or "eager"
        self._classifies = isinstance(module, Classifier)
        # Some heads read the state of the token that ends a text.
        self._ending = NO_IDS
        if isinstance(module, TextTower):
            ending = self.tokenizer.special_tokens[1]
            self._ending = np.array([token.id for token in ending], np.int64)
        elif self._classifies:
            self._ending = self.tokenizer.pair_template()[-1]
        marks_segments = self._classifies and module.marks_segments
        offset = SECOND_SEGMENT_OFFSET if marks_segments else 0
        self._positions = PositionScheme(segment_offset=offset)
        self._pack = partial(pack, device=target.device, positions=self._positions)
        texts, others = self._draw_texts(whole)
        # The same lengths, but every second text is reversed.
        self._texts, self._beside_others = self._pack(texts), self._pack(others)
        kept = np.concatenate([np.full(len(ids), i % 2 == 1) for i, ids in enumerate(texts)])
        self._kept = to_device(target.device, np.flatnonzero(kept))
        self._calibration = encode_calibration(self.tokenizer) if target.quantized else []
        self._refused: list[Proof] = []
        self._compute_alone(whole)

    def make_backbone(self) -> Backbone:
        """Make the backbone that computes texts in the fastest way as if each was alone.

        Raises `StartupError` if there is none.
        """
        # Read before the parts of the module are replaced.
        tables = (part for part in self._module.modules() if isinstance(part, nn.Embedding))
        in_tables = sum(table.weight.numel() for table in tables)
        numbers = sum(parameter.numel() for parameter in self._module.parameters())
        configuration = describe_config(self._whole or self._module)
        transformer, target = self._choose()
        encode_images = getattr(self._module, "encode_images", None)
        if self._whole is not None:
            encode_images = partial(encode_message, self._whole, transformer)
        return Backbone(
            transformer,
            target,
            hidden_size=self._expected.shape[1],
            max_length=self._count,
            parameters=numbers - in_tables,
            positions=self._positions,
            configuration=configuration,
            encode_images=encode_images,
        )

    def _draw_texts(self, whole: Any) -> tuple[list[TokenIds], list[TokenIds]]:
        """Draw texts, one beyond all windows, and the same ones with every second text reversed."""
        config, ending = self._module.config, self._ending
        windows = [size for name, size in config.to_dict().items() if _WINDOWS.search(name)]
        windows.append(_read_option(config, "sliding_window"))  # Of ModernBERT no field.
        window = max((size for size in windows if type(size) is int), default=0)
        longest = min(_LONGEST_TRIAL, 2 * window + _LONG_TRIAL)
        # A packed text has no padding.
        padded = [] if config.model_type in PACKED_TYPES else [longest * 7 // 8]
        # Tokens that stand for pictures or sound are not embedded as others.
        named = [value for name, value in whole.config.to_dict().items() if "token" in name]
        ids = np.array([id_ for id_ in range(*_TRIAL_IDS) if id_ not in named])
        random, lengths = np.random.default_rng(0), sorted((*_TRIAL_LENGTHS, *padded, longest))
        texts = [random.choice(ids, min(length, self._count)) for length in lengths]
        # A head that needs as many ending tokens in each text of a batch does not get batches.
        for text in texts[1::2] if self._classifies else ():
            text[: len(ending)] = ending[: len(text)]
        others = [ids[::-1].copy() if i % 2 == 0 else ids for i, ids in enumerate(texts)]
        for text in (*texts, *others):
            text[max(0, len(text) - len(ending)) :] = ending[-len(text) :]
            if self._positions.segment_offset:
                text[len(text) // 2 :] |= SECOND_SEGMENT
        return texts, others

    @torch.inference_mode()
    def _compute_alone(self, whole: Any) -> None:
        """Compute the states of each text alone; raises `StartupError` if they are unusable."""
        alone = PaddedModule(self._module, ALONE)
        try:
            if self._is_part:
                texts = torch.split(self._texts.input_ids, self._texts.lengths, dim=1)
                self._expected = torch.cat([compute_states(whole, text)[0] for text in texts])
            else:
                self._expected = alone(self._texts)
        except Exception as error:
            raise _cannot_compute_error(self._described, error) from error
        if not self._expected.cpu().isfinite().any():
            raise never_finite_error(f"in {self._folder}")
        is_bidirectional = getattr(self._module.config, "is_causal", None) is False
        if is_bidirectional and self._count > 1 and not self._classifies:
            first, other = (alone(self._pack([np.array([5, last])]))[0] for last in (6, 7))
            if torch.equal(first, other):
                raise StartupError(
                    f"{self._described} attends in both directions by its configuration, but "
                    "transformers computes it as causal"
                )
        if self._calibration:
            self._exact = alone(self._pack(self._calibration))

    @torch.inference_mode()
    def _choose(self) -> tuple[Transformer, Target]:
        """Return the transformer of the fastest way that holds, and its target."""
        config, target, layouts = self._module.config, self._target, [PADDED, ONE_LENGTH, ALONE]
        ways: list[tuple[str, list[str]]] = []
        selects_keys = any(_read_option(config, name) for name in _KEY_COUNTS)
        if selects_keys or _rotary_kinds(config) & _KINDS_BY_LONGEST:
            layouts.remove(PADDED)
        elif config.model_type in PACKED_TYPES and not isinstance(self._module, HeadedModule):
            ways.append((_BACKEND, [PACKED]))
        if not target.attention_named:
            ways.append((_BACKEND, layouts))
            if not target.quantized:
                ways.append((TRANSFORMERS, layouts))
        for parts, tried in ways:
            if (found := self._try(parts, tried)) is not None:
                return found
        if target.attention_named:
            raise StartupError(
                f"the model in {self._folder} has its own attention, which no other can replace; "
                "set ATTENTION to auto"
            )
        failed = self._refused[-1]
        if target.quantized:
            reason = ": ".join(filter(None, (failed.reason, failed.message)))
            raise StartupError(
                f"{self._described} is not computed in 8 bits ({reason}); set DTYPE to auto"
            )
        differs = "computes different vectors for the same text each time"
        if self._is_part:
            differs = "computes a text otherwise than its text part, which alone could be served"
        raise StartupError(f"{self._described} {differs} ({failed.reason})")

    def _try(self, parts: str, layouts: list[str]) -> tuple[Transformer, Target] | None:
        """Return the first layout that holds if `parts` computes the module's parts, or None."""
        if self._refused:  # The module's parts were replaced.
            whole, self._module = self._load()
            self._whole = self._whole and whole
        refused, packs = list[Proof](), layouts == [PACKED]
        try:
            make, target = self._prepare(parts, packs=packs)
            for layout in layouts:
                proof = self._prove(layout, make)
                if proof.holds:
                    transformer = make(layout)
                    self._finish(transformer)
                    target = target.with_path(_LAYOUT, layout, refused)
                    return transformer, replace(target, refused=(*self._refused, *target.refused))
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
        make: Callable[..., Transformer] = partial(PaddedModule, module)
        if parts == TRANSFORMERS:
            return make, target.with_path(ATTENTION, self._own_attention)
        if packs:
            AttentionInterface.register(_PACKED_ATTENTION, attend_packed)
            module.set_attn_implementation(_PACKED_ATTENTION)
        body = module.body if isinstance(module, HeadedModule) else module
        found = find_parts(body, target.dtype, packed=packs)
        operations = sorted({name for part in found for name in part.match.operations})
        shapes = _read_shapes(module, self._expected.shape[1])
        target = prove(target, shapes, [ATTENTION, *operations] if packs else operations)
        if packs:
            attend = target.backend.attention
            make = lambda *_: PackedModule(module, attend)  # noqa: E731 - has the other's arguments
        else:
            target = target.with_path(ATTENTION, self._own_attention)
        if not target.quantized:
            replace_parts(found, target.backend)
            return make, target
        # One call calibrates all texts; a module that is not packed gets them as one text.
        texts = (
            self._calibration
            if packs
            else [np.concatenate(self._calibration)[: self.tokenizer.max_length]]
        )
        with calibrating_backend(target.backend, target.dtype) as int8_backend:
            replace_parts(found, int8_backend)
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

    def _finish(self, transformer: Transformer) -> None:
        """Measure the attention's memory; log a warning if vectors in 8 bits are inexact."""
        if isinstance(transformer, PaddedModule):
            transformer.measure_attention(self._count, self._target.device, self._ending)
        if self._calibration:
            texts = self._pack(self._calibration)
            warn_if_inexact(self._folder.name, transformer(texts), self._exact, texts)


def _cannot_compute_error(described: str, error: Exception) -> StartupError:
    """Return an error that says why a model cannot compute a text, as far as `error` tells."""
    message = one_line(error)
    reasons = (reason for words, reason in _REASONS.items() if re.search(words, message))
    reason = next(reasons, "cannot compute every text alone in its batch")
    return StartupError(f"{described} {reason}: {message}")


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
