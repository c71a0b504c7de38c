"""Embedders, and what models of all tasks share: a forward is launched, and collected later.

`HeadsEmbedder` computes any of several kinds of vectors of the same states: `M3Embedder`, for the
kind of bge-m3, dense vectors, lexical weights and ColBERT vectors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from smart_embedder.errors import InferenceError
from smart_embedder.hardware.transfer import DeviceRows, HostRows, not_finite, start_copies
from smart_embedder.interface import ModelInfo
from smart_embedder.kernels.backend import Backend
from smart_embedder.kernels.packed_batch import (
    TOKEN_ID,
    End,
    Indices,
    PackedBatch,
    Spans,
    select_sequences,
    select_tokens,
    to_device,
)
from smart_embedder.kernels.proof import Target
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.int8 import encode_calibration
from smart_embedder.models.families.registry import load_encoder, load_tokenizer
from smart_embedder.models.files.config import read_pooling, read_prompts
from smart_embedder.models.files.digest import Content, short
from smart_embedder.models.files.weights import read_linear
from smart_embedder.models.heads.pooling import ENDS, mean
from smart_embedder.models.tokenizer import NO_IDS, TextTokenizer
from smart_embedder.requests import (
    CUT_AT_END,
    FloatArray,
    InputType,
    Outputs,
    SparseVector,
    TextEmbedding,
    TokenIds,
    TokenizedText,
    TruncationOptions,
)
from smart_embedder.vector_space import NONE, RAW, UNIT, VectorSpace

Result = TypeVar("Result")
# From the states `[R, hidden]` of the tokens that are read to `[R, ...]`.
TokenHead = Callable[[Tensor], DeviceRows]
# From the states `[T, hidden]` of a batch to `[S, width]`, of the sequences at S packed indices.
SequenceHead = Callable[[Tensor, PackedBatch, Indices], DeviceRows]


@dataclass(frozen=True, slots=True)
class Made:
    """How one kind of results is made of states, as a `VectorSpace` tells it.

    Names of tensors that are for this kind alone begin with `head`; `steps` is what else is
    computed. `reading` is what is read beside a text, by default the prompts of the model.
    """

    pooling: str
    dimensions: int
    unit_length: bool = False
    head: str = ""
    steps: str = ""
    reading: object = None


class DeviceModel(ABC, Generic[Result]):
    """Implements `smart_embedder.interface.Model` but for `launch`.

    Subclasses set in `_made` how each kind of their results is made. Only embedders have prompts.
    """

    max_batch_sequences: int | None = None
    prompts: Mapping[str, str] = {}
    default_prompt = ""
    _made: Mapping[str, Made]

    def __init__(self, name: str, backbone: Backbone, tokenizer: TextTokenizer) -> None:
        self.name = name
        self.max_length = tokenizer.max_length
        self.special_tokens = tokenizer.special_tokens
        self.token_spans = tokenizer.spans
        self.spaces: Mapping[str, VectorSpace] = {}
        self._backbone = backbone
        self._tokenizer = tokenizer

    @property
    def info(self) -> ModelInfo:
        """How it is computed."""
        return replace(
            self._backbone.target.describe(self.name),
            reproducible=self.reproducible,
            vector_space={kind: str(space) for kind, space in self.spaces.items()},
        )

    @property
    def reproducible(self) -> bool:
        """Implement `smart_embedder.interface.Model`."""
        return self._backbone.reproducible or self.max_batch_sequences == 1

    def run_alone(self) -> None:
        """Give each sequence a forward of its own, if its numbers depend on the batch otherwise."""
        if not self.reproducible:
            self.max_batch_sequences = 1

    def identify(self, content: Content) -> None:
        """Set the spaces of its results, by what was read while it was loaded."""
        heads = tuple(each.head for each in self._made.values() if each.head)
        # Those of modules behind the transformer lie in folders of their own.
        own = {name for name in content.tensors if "/" in name or name.startswith(heads)}
        weights = content.digest(content.tensors.keys() - own, self._backbone.configuration)
        spaces = {}
        for kind, each in self._made.items():
            reading = each.reading or self._prompts_read
            head = {name for name in own if "/" in name or name.startswith(each.head or "/")}
            spaces[kind] = VectorSpace(
                kind,
                weights=short(weights, 12),
                tokenizer=short(self._tokenizer.digest, 8),
                pooling=each.pooling,
                projection=short(content.digest(head, each.steps), 8)
                if head or each.steps
                else NONE,
                normalisation=UNIT if each.unit_length else RAW,
                prompts=short(content.digest((), reading), 8) if reading else NONE,
                truncation=f"{self.max_length}end",
                dimensions=str(each.dimensions),
            )
        self.spaces = spaces

    @property
    def _prompts_read(self) -> object:
        """The prompts, for `Made`; None where there are none."""
        named = sorted((name, text) for name, text in self.prompts.items() if text)
        return (named, self.default_prompt) if named or self.default_prompt else None

    def capture_graphs(self) -> None:
        """Launch small batches as CUDA graphs from now on, where those can be used."""
        for _ in self.capture_graphs_in_steps():
            pass

    def capture_graphs_in_steps(self) -> Iterator[None]:
        """Do the same, and yield wherever the device may do other work."""
        return self._backbone.capture_graphs_in_steps()

    def with_fewer_layers(self) -> tuple[Self, float]:
        """A copy with fewer layers, for measurements only, and by what factor this one has more."""
        fewer = copy(self)
        fewer._backbone, times = self._backbone.with_fewer_layers()  # noqa: SLF001 - its own
        return fewer, times

    @abstractmethod
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[Result | InferenceError]]:
        """Implement `smart_embedder.interface.Model`."""

    def forward(self, sequences: list[TokenIds], outputs: Outputs) -> list[Result | InferenceError]:
        """Launch with the same kinds for every sequence, and wait."""
        return self.launch(sequences, [outputs] * len(sequences))()


class EmbeddingModel(DeviceModel[TextEmbedding]):
    """Implements `engine.model.Embedder` but for `launch` and attributes without a value."""

    kinds: Outputs
    pooling: str
    normalizes: bool
    min_dimensions: int | None = None
    reads_input_type = False
    colbert_width = 0

    def __init__(
        self,
        name: str,
        backbone: Backbone,
        tokenizer: TextTokenizer,
        prompts: Mapping[str, str],
        default_prompt: str = "",
    ) -> None:
        super().__init__(name, backbone, tokenizer)
        self.prompts = prompts
        self.default_prompt = default_prompt
        self.dense_width = backbone.hidden_size
        self.token_strings = tokenizer.token_strings

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Token ids of each text behind `prompt`, cut to `max_length`; special tokens stay."""
        del input_type  # Most models read queries and documents alike, or have a prompt for each.
        return self._tokenizer.encode(texts, prompt, truncation)

    def colbert_tokens(self, ids: TokenIds) -> TokenIds:
        """The token of each ColBERT vector."""
        return ids[self._with_vector(ids)] & TOKEN_ID

    def _with_vector(self, ids: TokenIds) -> slice | npt.NDArray[np.bool_]:
        """Which tokens have a ColBERT vector: in bge-m3 all but the first, the dense vector's."""
        del ids
        return slice(1, None)


class HeadsEmbedder(EmbeddingModel):
    """Implements `DeviceModel.launch`: each head reads the texts that request its kind.

    The names of heads are those of `Outputs`; a kind without a head is left out. Subclasses set the
    heads. Dense vectors are made of the state of one token of each text, `_dense_end`, or of
    several. Tokens in `_without_weight` have no lexical weight.
    """

    _dense_head: SequenceHead | None = None
    _dense_end: End | None = None
    _token_heads: Mapping[str, TokenHead] = {}
    _without_weight = NO_IDS

    @torch.inference_mode()
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[TextEmbedding | InferenceError]]:
        """Implement `DeviceModel`."""
        every = any(each.sparse or each.colbert for each in outputs)
        packed = self._backbone.pack(sequences)
        hidden, read = self._backbone.forward_of(packed, None if every else self._dense_end)
        # The rows of each kind on the device, and which of them belong to each sequence.
        rows: dict[str, DeviceRows] = {}
        spans: dict[str, Spans] = {}
        wanted = [each.dense for each in outputs]
        if self._dense_head is not None and any(wanted):
            chosen, spans["dense"] = select_sequences(read, wanted)
            rows["dense"] = self._dense_head(hidden, read, chosen)
        # The states of the same tokens are gathered only once.
        gathered: dict[tuple[bool, ...], tuple[Tensor, Spans]] = {}
        for kind, head in self._token_heads.items():
            selected = tuple([getattr(each, kind) for each in outputs])
            if not any(selected):
                continue
            if selected not in gathered:
                tokens, token_spans = select_tokens(packed, selected, self._backbone.multiple_of)
                states = hidden if tokens is None else hidden.index_select(0, tokens)
                gathered[selected] = states, token_spans
            states, spans[kind] = gathered[selected]
            rows[kind] = head(states)
        if not rows:
            return lambda: [TextEmbedding()] * len(sequences)
        copies = start_copies([*rows.values()], packed.tokens)
        return partial(self._collect, copies, sequences, spans)

    def _collect(
        self,
        copies: Callable[[], list[HostRows]],
        sequences: list[TokenIds],
        spans: Mapping[str, Spans],
    ) -> list[TextEmbedding | InferenceError]:
        """The results; `spans` has the kinds in the order of the copies."""
        found: list[dict[str, Any]] = [{} for _ in sequences]
        failed: set[int] = set()
        for (kind, all_spans), host in zip(spans.items(), copies(), strict=True):
            asking = {index: span for index, span in enumerate(all_spans) if span is not None}
            if not host.finite.all():
                failed |= {index for index, span in asking.items() if not host.finite[span].all()}
            texts = [sequences[index] for index in asking]
            rows = [host.values[span] for span in asking.values()]
            for index, vectors in zip(asking, self._vectors_of(kind, texts, rows), strict=True):
                found[index][kind] = vectors
        return [
            not_finite() if index in failed else TextEmbedding(**kinds)
            for index, kinds in enumerate(found)
        ]

    def _vectors_of(
        self, kind: str, sequences: list[TokenIds], rows: list[FloatArray]
    ) -> Sequence[Any]:
        """The vectors of this kind that `TextEmbedding` holds, from the rows of each sequence."""
        match kind:
            case "dense":
                return [row[0] for row in rows]
            case "sparse":
                return sparse_vectors(sequences, rows, self._without_weight)
        return [row[self._with_vector(ids)] for row, ids in zip(rows, sequences, strict=True)]


def token_vectors(head: nn.Module, backbone: Backbone, states: Tensor) -> DeviceRows:
    """`[R, colbert width]`, each of unit length, from states `[R, hidden]`."""
    return DeviceRows(*backbone.backend.unit_rows(head(states), backbone.wire_dtype))


def sparse_vectors(
    sequences: list[TokenIds], weights: list[FloatArray], without_weight: TokenIds
) -> list[SparseVector]:
    """For each sequence its largest weight for each distinct token, where above 0.

    Tokens in `without_weight` have none. One sort over the whole batch; never an array as long as
    the vocabulary.
    """
    ids = np.concatenate(sequences)
    values = np.concatenate(weights)
    owner = np.repeat(np.arange(len(sequences)), [len(s) for s in sequences])
    kept = (values > 0) & ~np.isin(ids, without_weight)
    keys, inverse = np.unique(owner[kept] << 32 | ids[kept], return_inverse=True)
    largest = np.zeros(len(keys), dtype=np.float32)
    np.maximum.at(largest, inverse, values[kept])
    borders = np.searchsorted(keys, np.arange(1, len(sequences)) << 32)
    indices = keys & 0xFFFFFFFF
    pairs = zip(np.split(indices, borders), np.split(largest, borders), strict=True)
    return [SparseVector(index, value) for index, value in pairs]


# Those of bge-m3, by their files.
HEADS = _SPARSE_HEAD, _COLBERT_HEAD = "sparse_linear.pt", "colbert_linear.pt"
# Tokens without a lexical weight: special, padding and unknown ones.
_WITHOUT_WEIGHT = ("<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[PAD]", "[UNK]")


class M3Embedder(HeadsEmbedder):
    """Implements `smart_embedder.interface.Embedder` for checkpoints of bge-m3's shape."""

    kinds = Outputs(dense=True, sparse=True, colbert=True)
    normalizes = True

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load it; raises `StartupError` for whatever is wrong with the folder."""
        tokenizer = load_tokenizer(folder, max_length)
        backbone = load_encoder(folder, target, encode_calibration(tokenizer))
        width = backbone.hidden_size
        sparse_head = backbone.place_head(read_linear(folder / _SPARSE_HEAD, width, 1))
        linear = read_linear(folder / _COLBERT_HEAD, width)
        self.colbert_width, colbert_head = linear.out_features, backbone.place_head(linear)
        self.pooling = read_pooling(folder)
        super().__init__(name, backbone, tokenizer, read_prompts(folder))
        self._dense_head = partial(dense_vectors, backbone.backend, self.pooling)
        self._dense_end = ENDS.get(self.pooling)
        self._token_heads = {
            "sparse": partial(token_weights, sparse_head),
            "colbert": partial(token_vectors, colbert_head, backbone),
        }
        without_weight = map(tokenizer.token_id, _WITHOUT_WEIGHT)
        self._without_weight = np.array([i for i in without_weight if i is not None], np.int64)
        words, of_colbert = tokenizer.vocabulary_size, self.colbert_width
        self._made = {
            "dense": Made(self.pooling, width, unit_length=True),
            "sparse": Made("max", words, head="sparse_linear."),
            "colbert": Made("token", of_colbert, unit_length=True, head="colbert_linear."),
        }


def dense_vectors(
    backend: Backend, pooling: str, hidden: Tensor, packed: PackedBatch, sequences: Indices
) -> DeviceRows:
    """`[S, hidden]` float32 of unit length: one for each of the `sequences`, packed indices."""
    if pooling == "cls":
        if len(packed.unpack_order) == 1:  # It begins the batch: no index need be copied for it.
            return DeviceRows(*backend.unit_rows(hidden[:1], torch.float32))
        first = to_device(hidden.device, packed.offsets[sequences])
        return DeviceRows(*backend.unit_rows(hidden, torch.float32, first))
    chosen = to_device(hidden.device, sequences)
    return DeviceRows(*backend.unit_rows(mean(hidden, packed), torch.float32, chosen))


def token_weights(head: nn.Module, states: Tensor) -> DeviceRows:
    """`[R]`: the lexical weight of each token with states `[R, hidden]`, if it is above 0."""
    return DeviceRows.of(head(states).squeeze(-1))
