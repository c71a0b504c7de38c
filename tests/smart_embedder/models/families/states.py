"""The states of a checkpoint's tokens on the CPU, in any dtype and with any attention."""

from pathlib import Path

import numpy as np
import torch

from smart_embedder.kernels.target import Target, choose_backend
from smart_embedder.models.families.backbone import Backbone
from smart_embedder.models.families.registry import load_backbone, load_own
from smart_embedder.models.files.config import TextOptions

CPU = torch.device("cpu")


def target(
    dtype: torch.dtype = torch.float32, attention: str = "sdpa", *, quantized: bool = False
) -> Target:
    return Target(CPU, dtype, choose_backend(CPU, dtype, attention), quantized=quantized)


def load(folder: Path, model_target: Target) -> Backbone:
    """Load the encoder or decoder in a folder; read its tokenizer only for 8 bits."""
    if model_target.quantized:
        return load_backbone(folder, model_target, 8192, TextOptions())[0]
    return load_own(folder, model_target, ())


def random_sequences(lengths: tuple[int, ...], vocabulary: int = 120) -> list[np.ndarray]:
    """Draw token ids, among them 0 and 1, which are padding tokens that a text may contain."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, length) for length in lengths]


@torch.inference_mode()
def states_of(folder: Path, model_target: Target, sequences: list[np.ndarray]) -> torch.Tensor:
    """Return the states of all texts, in the order of the texts."""
    backbone = load(folder, model_target)
    packed = backbone.pack(sequences)
    states = backbone.forward(packed)
    assert states.dtype == backbone.dtype == model_target.dtype
    spans = [slice(*packed.offsets[index : index + 2]) for index in packed.unpack_order]
    return torch.cat([states[span] for span in spans])
