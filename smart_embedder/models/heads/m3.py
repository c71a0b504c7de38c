"""bge-m3: dense, sparse and ColBERT vectors from one forward."""

from functools import partial
from pathlib import Path

from smart_embedder.kernels.target import Target
from smart_embedder.models.families.registry import load_backbone
from smart_embedder.models.files.config import (
    TextOptions,
    read_pooling,
    read_prompts,
    require_known_modules,
)
from smart_embedder.models.files.weights import Weights
from smart_embedder.models.heads.embedder import (
    HeadsEmbedder,
    compute_colbert_vectors,
    compute_dense_vectors,
    compute_token_weights,
    find_tokens_without_weight,
)
from smart_embedder.models.heads.pooling import ENDS
from smart_embedder.models.runner import OutputSpec
from smart_embedder.requests import Outputs

# The files of bge-m3's heads.
HEADS = _SPARSE_HEAD, _COLBERT_HEAD = "sparse_linear.pt", "colbert_linear.pt"


class M3Embedder(HeadsEmbedder):
    """Implements `smart_embedder.interface.Embedder` for checkpoints with the heads of bge-m3."""

    kinds = Outputs(dense=True, sparse=True, colbert=True)
    normalizes = True

    def __init__(self, name: str, folder: Path, max_length: int, target: Target) -> None:
        """Load the model; raises `StartupError` if the folder cannot be used."""
        require_known_modules(folder, "Transformer", "Pooling", "Normalize")
        backbone, tokenizer = load_backbone(folder, target, max_length, TextOptions())
        width = backbone.hidden_size
        sparse = Weights.read_head(folder / _SPARSE_HEAD).linear("sparse_linear", width, 1)
        linear = Weights.read_head(folder / _COLBERT_HEAD).linear("colbert_linear", width, None)
        sparse_head = backbone.place_head(sparse)
        self.colbert_width, colbert_head = linear.out_features, backbone.place_head(linear)
        self.pooling = read_pooling(folder)
        super().__init__(name, backbone, tokenizer, read_prompts(folder))
        self._dense_head = partial(compute_dense_vectors, backbone.backend, self.pooling)
        self._dense_end = ENDS.get(self.pooling)
        self._token_heads = {
            "sparse": partial(compute_token_weights, sparse_head),
            "colbert": partial(compute_colbert_vectors, colbert_head, backbone),
        }
        self._without_weight = find_tokens_without_weight(tokenizer)
        self._output_specs = {
            "dense": OutputSpec(self.pooling, width, unit_length=True),
            "sparse": OutputSpec("max", tokenizer.vocabulary_size, head="sparse_linear."),
            "colbert": OutputSpec(
                "token", self.colbert_width, unit_length=True, head="colbert_linear."
            ),
        }
