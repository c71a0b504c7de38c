"""What fake models tell of themselves, and the error of a fake device.

It stands here because planted faults are looked for in a copy of this folder alone.
"""

from collections.abc import Mapping
from types import MappingProxyType

from smart_embedder.requests import Outputs
from smart_embedder.vector_space import VectorSpace


class AcceleratorError(RuntimeError):
    """As PyTorch raises it: the device's guard knows it by its name and its code."""

    def __init__(self, code: object) -> None:
        super().__init__(f"CUDA error {code}")
        self.error_code = code


class PlainModel:
    """What every model tells of itself, where nothing is special."""

    name = "fake"
    max_length = 100
    max_batch_sequences: int | None = None
    reproducible = True
    spaces: Mapping[str, VectorSpace] = MappingProxyType({})


class PlainEmbedder:
    """What every embedder tells of itself besides."""

    kinds = Outputs(dense=True, sparse=True, colbert=True)
    colbert_width = 0
    dense_width = 4
    normalizes = True
    min_dimensions: int | None = None
    pooling = "mean"
    prompts: Mapping[str, str] = MappingProxyType({})
    default_prompt = ""
    reads_input_type = False
