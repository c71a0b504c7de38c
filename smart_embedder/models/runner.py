"""A model on its device: runs one packed forward, and copies its results back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

from smart_embedder.errors import InferenceError
from smart_embedder.interface import ModelInfo
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.files.digest import encode_short
from smart_embedder.models.files.record import ReadRecord
from smart_embedder.models.tokenizer import TextTokenizer
from smart_embedder.requests import Outputs
from smart_embedder.tokens import TokenIds
from smart_embedder.vector_space import NONE, RAW, UNIT, VectorSpace

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """How one kind of results is computed from hidden states, for the id of its `VectorSpace`.

    Names of tensors that only this kind uses begin with `head`; `steps` describes other layers.
    `reading` describes what is read besides a text, by default the prompts of the model. Their
    representations (`repr`) are hashed: a renamed class or field in them would change the id.
    """

    pooling: str
    dimensions: int
    unit_length: bool = False
    head: str = ""
    steps: str = ""
    reading: object = None


class DeviceModel(ABC, Generic[Result]):
    """Implements `smart_embedder.interface.Model` except `launch`.

    Subclasses set an `OutputSpec` for each kind of their results. Only embedders have prompts.
    """

    max_batch_sequences: int | None = None
    prompts: Mapping[str, str] = {}
    default_prompt = ""
    _output_specs: Mapping[str, OutputSpec]

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
        """The number format, kernels and vector spaces of the model."""
        return replace(
            self._backbone.target.describe(self.name),
            reproducible=self.reproducible,
            vector_space={kind: str(space) for kind, space in self.spaces.items()},
        )

    @property
    def reproducible(self) -> bool:
        """Implement `smart_embedder.interface.Model`."""
        return self._backbone.reproducible or self.max_batch_sequences == 1

    def make_reproducible(self) -> None:
        """Run one sequence per forward where results would depend on the rest of the batch."""
        if not self.reproducible:
            self.max_batch_sequences = 1

    def set_vector_spaces(self, record: ReadRecord) -> None:
        """Set the vector space of each kind from what was read while the model was loaded."""
        prefixes = tuple(spec.head for spec in self._output_specs.values() if spec.head)
        # Modules behind the transformer lie in folders of their own.
        heads = {name for name in record.digests if "/" in name or name.startswith(prefixes)}
        names = record.digests.keys() - heads
        weights = record.combine_digests(names, self._backbone.configuration)
        spaces = {}
        for kind, spec in self._output_specs.items():
            reading = spec.reading or self._prompts_read
            head = {name for name in heads if "/" in name or name.startswith(spec.head or "/")}
            spaces[kind] = VectorSpace(
                kind,
                weights=encode_short(weights, 12),
                tokenizer=encode_short(self._tokenizer.digest, 8),
                pooling=spec.pooling,
                projection=encode_short(record.combine_digests(head, spec.steps), 8)
                if head or spec.steps
                else NONE,
                normalisation=UNIT if spec.unit_length else RAW,
                prompts=encode_short(record.combine_digests((), reading), 8) if reading else NONE,
                truncation=f"{self.max_length}end",
                dimensions=str(spec.dimensions),
            )
        self.spaces = spaces

    @property
    def _prompts_read(self) -> object:
        """The prompts, for `OutputSpec.reading`; None if there are none."""
        named = sorted((name, text) for name, text in self.prompts.items() if text)
        return (named, self.default_prompt) if named or self.default_prompt else None

    def capture_graphs(self) -> None:
        """Launch small batches as CUDA graphs from now on, where the device supports it."""
        for _ in self.capture_graphs_in_steps():
            pass

    def capture_graphs_in_steps(self) -> Iterator[None]:
        """Do the same, and yield wherever the device may do other work."""
        return self._backbone.capture_graphs_in_steps()

    def with_fewer_layers(self) -> tuple[Self, float]:
        """Return a copy with fewer layers, for measurements, and the factor to multiply them by."""
        fewer = copy(self)
        fewer._backbone, factor = self._backbone.with_fewer_layers()  # noqa: SLF001 - of the copy
        return fewer, factor

    @abstractmethod
    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], list[Result | InferenceError]]:
        """Implement `smart_embedder.interface.Model`."""

    def forward(self, sequences: list[TokenIds], outputs: Outputs) -> list[Result | InferenceError]:
        """Compute the same kinds for every sequence, and wait for the results."""
        return self.launch(sequences, [outputs] * len(sequences))()
