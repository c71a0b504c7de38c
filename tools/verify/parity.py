"""Compare this engine's vectors and scores with those of the reference implementations.

Runs the configured models by this engine and by the references, and prints the largest difference
of each output with a verdict. DTYPE=auto means float32; other formats are compared with the
references' float32 at a wider tolerance. Before that, it compares each implementation of an
operation that this machine can run with PyTorch's.
"""

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from app.settings import load_settings
from smart_embedder.core import EngineCore
from smart_embedder.errors import StartupError
from smart_embedder.hardware.device import (
    choose_device,
    choose_dtype,
    cpu_has_bfloat16,
    cpu_has_int8,
    has_float8,
)
from smart_embedder.kernels.proof import prove_paths
from smart_embedder.kernels.target import (
    DECODER,
    ENCODER,
    FLOAT8_OPERATIONS,
    GPU_ENCODER,
    INT8_OPERATIONS,
    Proof,
    Shapes,
    Target,
    choose_backend,
)
from smart_embedder.models.loader import locate_models
from smart_embedder.requests import EmbedRequest, RerankRequest
from smart_embedder.results import FloatArray, SparseVector, TextEmbedding
from smart_embedder.settings import FLOAT8, INT8, NO_RERANKER, EngineSettings
from smart_embedder.startup import load_models
from tools.references.choose import References
from tools.references.reference import PATIENT, EmbeddingReference, ReferenceMissingError

# The shapes of bge-m3 and Qwen3-0.6B.
_ENCODER_SHAPES = Shapes(1024, 4096, 16, 16, 64, "gelu")
_DECODER_SHAPES = Shapes(1024, 3072, 16, 8, 128, bias=False, causal=True)
QUERY = "How do I combine keyword search with semantic search?"
_SENTENCES = [
    "Hybrid search joins the exact words of a query with its meaning in one ranking.",
    "Dense Vektoren tragen die Bedeutung, spärliche die Wörter, die wirklich dastehen.",
    "Le moteur calcule trois sortes de vecteurs en un seul passage.",
    "La búsqueda léxica encuentra nombres propios y números de pieza.",
    "検索エンジンは質問に合う文書を探します。",
    "混合检索把关键词和语义结合起来。",
    "Поиск по смыслу находит то, что сказано другими словами.",
    "البحث الهجين يجمع بين الكلمات والمعنى.",
    "חיפוש היברידי משלב מילים ומשמעות.",
    "Bake the bread at 230 °C for 35 minutes, then let it cool on a rack.",
]
TEXTS = [
    *_SENTENCES,
    "",
    "a",
    "👩\u200d💻 writes tests 🙂",
    "search search search hybrid search",
    " ".join(_SENTENCES),
    " ".join(_SENTENCES * 4),
    " ".join(_SENTENCES * 12),
]
PASSAGES = [*_SENTENCES, " ".join(_SENTENCES), " ".join(_SENTENCES * 8)]
_FLOAT32_TOLERANCE = 1e-4
_HALF_TOLERANCE = 5e-2
# For longer texts the attention of some references needs gigabytes.
_MAX_LENGTH = 2048


def prove_all(device_name: str) -> Iterator[tuple[str, str, Proof]]:
    """Yield the architecture, the number format and the proof of each path on this device."""
    device = choose_device(device_name)
    on_cpu = device.type == "cpu"
    dtypes = [choose_dtype("auto", device, qwen=qwen) for qwen in (False, True)]
    if on_cpu:
        dtypes = [torch.float32, *([torch.bfloat16] if cpu_has_bfloat16() else [])]
    encoder = ENCODER if on_cpu else GPU_ENCODER
    models = (("encoder", _ENCODER_SHAPES, encoder), ("decoder", _DECODER_SHAPES, DECODER))
    cases: list[tuple[str, str, torch.dtype, Shapes, Sequence[str]]] = [
        (model, str(dtype).removeprefix("torch."), dtype, shapes, operations)
        for dtype in dict.fromkeys([*dtypes, torch.float32])
        for model, shapes, operations in models
    ]
    if on_cpu and cpu_has_int8():
        dtype = choose_dtype(INT8, device)
        cases.append(("encoder", INT8, dtype, _ENCODER_SHAPES, INT8_OPERATIONS))
    if has_float8(device):
        dtype = choose_dtype(FLOAT8, device)
        cases.append(("encoder", FLOAT8, dtype, _ENCODER_SHAPES, FLOAT8_OPERATIONS))
    for model, name, dtype, shapes, operations in cases:
        target = Target(device, dtype, choose_backend(device, dtype))
        for operation in operations:
            yield from ((model, name, proof) for proof in prove_paths(target, shapes, operation))


def print_paths(device_names: Sequence[str]) -> None:
    """Print the difference and the verdict of each path, and how many agree."""
    heads = (
        f"{'Model':9}{'Format':10}{'Operation':21}{'Path':19}{'Difference':>11}{'Tolerance':>11}"
    )
    print(heads)
    held: list[bool] = []
    for model, dtype, proof in itertools.chain.from_iterable(map(prove_all, device_names)):
        verdict = "ok" if proof.holds else f"refused: it {proof.reason} {proof.message}".rstrip()
        names = f"{model:9}{dtype:10}{proof.operation:21}{proof.path:19}"
        print(f"{names}{proof.difference:11.1e}{proof.tolerance:11.0e}  {verdict}")
        held.append(proof.holds)
    print(f"\n{sum(held)} of {len(held)} paths compute what the plain reference does.\n")


@dataclass(frozen=True, slots=True)
class Row:
    """The largest difference of one output, and the tolerance."""

    output: str
    reference: str
    compared: int
    difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is within tolerance; False for NaN."""
        return self.difference <= self.tolerance


async def compare(settings: EngineSettings) -> list[Row]:
    """Compare each output of the configured models with its reference, in one row each."""
    async with EngineCore(settings, load_models) as engine:
        async with engine.lease() as models:
            kinds = models.kinds
        for info in models.infos:
            paths = ", ".join(f"{operation} by {path}" for operation, path in info.paths.items())
            print(f"{info.name} in {info.dtype}: {paths}.")
        print()
        ours = (await engine.embed(EmbedRequest(TEXTS, kinds))).embeddings
        scores = None
        if settings.reranker_model != NO_RERANKER:
            scores = (await engine.rerank(RerankRequest(QUERY, PASSAGES))).scores
    tolerance = _FLOAT32_TOLERANCE if settings.dtype == "float32" else _HALF_TOLERANCE
    references = References(settings)
    rows = list(rows_of(references.embedding, ours, tolerance))
    if references.dense is not None:
        rows = [row for row in rows if row.output != "dense"]
        rows += rows_of(references.dense, ours, tolerance)
    if scores is not None and references.reranking is not None:
        theirs = [references.reranking.scores(QUERY, [passage])[0] for passage in PASSAGES]
        difference = _largest(np.array(scores), np.array(theirs))
        package = references.reranking.package
        rows.append(Row("rerank score", package, len(theirs), difference, tolerance))
    return rows


def rows_of(
    reference: EmbeddingReference, ours: list[TextEmbedding], tolerance: float
) -> Iterator[Row]:
    """Yield a row for each kind of vectors of the reference.

    The reference gets one text at a time, because in a batch it would pad each to the longest.
    """
    theirs = [embedding for text in TEXTS for embedding in reference.embed([text])]
    for kind, difference in _DIFFERENCES.items():
        both = [(getattr(a, kind), getattr(b, kind)) for a, b in zip(ours, theirs, strict=True)]
        if both[0][1] is not None:
            # Unlike max, np.max propagates NaN.
            largest = float(np.max([difference(a, b) for a, b in both]))
            yield Row(kind, reference.package, len(both), largest, tolerance)


def limit_settings(settings: EngineSettings) -> EngineSettings:
    """Copy the settings with a definite dtype, and lengths that the padding references can run."""
    names = ("qwen_embed_max_length", "bge_rerank_max_length", "qwen_rerank_max_length")
    lengths = {name: min(getattr(settings, name), _MAX_LENGTH) for name in names}
    lengths["bge_embed_max_length"] = min(settings.embed_max_length, _MAX_LENGTH)
    dtype = "float32" if settings.dtype == "auto" else settings.dtype
    return settings.model_copy(update={"dtype": dtype} | lengths | PATIENT)


def print_table(rows: list[Row]) -> None:
    """Print the rows and the number of outputs that agree."""
    print(
        f"{'Output':14}{'Reference':16}{'Compared':>9}{'Largest difference':>20}{'Tolerance':>11}"
    )
    for row in rows:
        verdict = "ok" if row.agrees else "OUT OF TOLERANCE"
        figures = f"{row.compared:9}{row.difference:20.2e}{row.tolerance:11.0e}"
        print(f"{row.output:14}{row.reference:16}{figures}  {verdict}")
    agreed = sum(row.agrees for row in rows)
    print(f"\n{agreed} of {len(rows)} outputs agree with their reference.")


def check() -> int:
    """Compare, print, and return the exit status: 1 if an output is out of tolerance."""
    try:
        settings = limit_settings(load_settings())
        locate_models(settings)  # A missing model must be reported before the paths run.
        print_paths(settings.devices)
        rows = asyncio.run(compare(settings))
    except (StartupError, ReferenceMissingError) as error:
        print(f"The check cannot run: {error}", file=sys.stderr)
        return 2
    print_table(rows)
    return 0 if all(row.agrees for row in rows) else 1


def _largest(ours: FloatArray, theirs: FloatArray) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours - theirs).max(initial=0.0))


def _dense_difference(ours: FloatArray, theirs: FloatArray) -> float:
    """Return the difference divided by the vector's length: raw states grow with the width."""
    return _largest(ours, theirs) / max(float(np.linalg.norm(theirs)), 1e-12)


def _sparse_difference(ours: SparseVector, theirs: SparseVector) -> float:
    """Return the largest difference of a token's weight; a missing token has the weight 0.

    It is divided by the largest weight if that is above 1, as a sum over a text's tokens may be.
    """
    mine, other = (
        dict(zip(vector.indices.tolist(), vector.values.tolist(), strict=True))
        for vector in (ours, theirs)
    )
    differences = [abs(mine.get(id_, 0) - other.get(id_, 0)) for id_ in mine.keys() | other.keys()]
    largest: float = max([1.0, *other.values()])
    # A text may have no token with a weight.
    return float(np.max(differences, initial=0.0)) / largest


_DIFFERENCES: dict[str, Callable[[Any, Any], float]] = {
    "dense": _dense_difference,
    "sparse": _sparse_difference,
    "colbert": _largest,
}
