"""The attributes of fake models, and the error of a fake device.

They are in this folder because planted faults are simulated in a copy without other test folders.
"""

from collections.abc import Mapping
from types import MappingProxyType

from smart_embedder.requests import Outputs
from smart_embedder.vector_space import VectorSpace


class AcceleratorError(RuntimeError):
    """The error that PyTorch raises; `run_guarded` recognises it by its name and code."""

    def __init__(self, code: object) -> None:
        super().__init__(f"CUDA error {code}")
        self.error_code = code


class PlainModel:
    """The attributes of any model."""

    name = "fake"
    max_length = 100
    max_batch_sequences: int | None = None
    reproducible = True
    spaces: Mapping[str, VectorSpace] = MappingProxyType({})


class PlainEmbedder:
    """The further attributes of an embedder."""

    kinds = Outputs(dense=True, sparse=True, colbert=True)
    colbert_width = 0
    dense_width = 4
    normalizes = True
    similarity = "cosine"
    min_dimensions: int | None = None
    pooling = "mean"
    prompts: Mapping[str, str] = MappingProxyType({})
    default_prompt = ""
    reads_input_type = reads_images = False
