"""The target of a model: its device, its dtype, and the implementation of each operation."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from app.engine.loaded_models import ModelInfo, RefusedPath
from app.models.cuda_graphs import GRAPHS, LAUNCH, PLAIN, GraphedForwards
from app.models.ops.proof import Proof, Trial
from app.models.ops.proof_cases import Shapes
from app.models.ops.torch_backend import TorchBackend
from app.settings import INT8


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how a model runs.

    `paths` holds the name of the proven implementation of each operation, and `refused` the proofs
    that failed.
    """

    device: torch.device
    dtype: torch.dtype
    backend: TorchBackend
    # Matrix products in 8 bits, the rest in `dtype`.
    quantized: bool = False
    # Threads of every forward, where several workers share the cores of a CPU.
    cpu_threads: int | None = None
    # Whether a setting names the attention, so that no other may replace it.
    attention_named: bool = False
    paths: dict[str, str] = field(default_factory=dict)
    refused: tuple[Proof, ...] = ()

    def prove(self, shapes: Shapes, operations: Sequence[str]) -> Self:
        """A copy with proven operations; raises `StartupError` if one cannot be proven."""
        trial = Trial(self.backend, shapes, self.device, self.dtype)
        proven = trial.prove(operations, attention_named=self.attention_named)
        return replace(self, backend=proven.backend, paths=proven.paths, refused=proven.refused)

    def launched_by(self, graphs: GraphedForwards) -> Self:
        """A copy that describes whether forwards are launched as graphs."""
        launch = GRAPHS if graphs.forwards else PLAIN
        refused = () if graphs.proof.holds else (graphs.proof,)
        return replace(self, paths=self.paths | {LAUNCH: launch}, refused=(*self.refused, *refused))

    def describe(self, name: str) -> ModelInfo:
        """The description of a model that runs so."""
        return ModelInfo(
            name=name,
            dtype=INT8 if self.quantized else str(self.dtype).removeprefix("torch."),
            paths=self.paths,
            refused=tuple(RefusedPath(p.operation, p.path, p.reason) for p in self.refused),
        )
