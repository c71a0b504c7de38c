"""Where and how a model runs: device, number format, and what computes each operation."""

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

    `paths` names what computes each operation once it is proven, and `refused` what was not.
    """

    device: torch.device
    dtype: torch.dtype
    backend: TorchBackend
    # Matrix products in 8 bits, the rest in `dtype`.
    quantized: bool = False
    # Of every forward, where several workers share the cores of a CPU.
    cpu_threads: int | None = None
    # By a setting: no other attention may take its place.
    attention_named: bool = False
    paths: dict[str, str] = field(default_factory=dict)
    refused: tuple[Proof, ...] = ()

    def prove(self, shapes: Shapes, operations: Sequence[str]) -> Self:
        """The same with paths that are proven on the device; raises `StartupError` without any."""
        trial = Trial(self.backend, shapes, self.device, self.dtype)
        proven = trial.prove(operations, attention_named=self.attention_named)
        return replace(self, backend=proven.backend, paths=proven.paths, refused=proven.refused)

    def launched_by(self, graphs: GraphedForwards) -> Self:
        """The same with what became of the graphs of its forward."""
        launch = GRAPHS if graphs.forwards else PLAIN
        refused = () if graphs.proof.holds else (graphs.proof,)
        return replace(self, paths=self.paths | {LAUNCH: launch}, refused=(*self.refused, *refused))

    def describe(self, name: str) -> ModelInfo:
        """How the model of that name is computed."""
        return ModelInfo(
            name=name,
            dtype=INT8 if self.quantized else str(self.dtype).removeprefix("torch."),
            paths=self.paths,
            refused=tuple(RefusedPath(p.operation, p.path, p.reason) for p in self.refused),
        )
