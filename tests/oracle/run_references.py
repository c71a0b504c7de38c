"""Runs FastEmbed's MUVERA, and PyLate's pooling and models, in an environment of its own.

For each line `{"of": "muvera" | "pooled" | "colbert", ...}` that it reads, it writes a line with
the vectors that are computed from the `vectors` or `texts` in it.
"""

import json
import sys
from functools import cache

import numpy as np
import torch
from fastembed.postprocess import Muvera
from pylate.models import ColBERT


@cache
def encoder(width: int) -> Muvera:
    return Muvera(width)


def muvera(vectors: list[list[float]], side: str) -> list[float]:
    vectors = np.array(vectors, np.float32)
    encode = {"query": Muvera.process_query, "document": Muvera.process_document}[side]
    return encode(encoder(vectors.shape[1]), vectors).tolist()


def pooled(vectors: list[list[float]], factor: int) -> list[list[float]]:
    """Call a method of ColBERT that does not use its object."""
    documents = [torch.tensor(vectors, dtype=torch.float32)]
    (means,) = ColBERT.pool_embeddings_hierarchical(None, documents, factor, protected_tokens=0)
    return means.tolist()


@cache
def model(folder: str) -> ColBERT:
    return ColBERT(folder, device="cpu")


def colbert(folder: str, texts: list[str], side: str) -> list[list[list[float]]]:
    embedded = model(folder).encode(texts, is_query=side == "query", show_progress_bar=False)
    return [vectors.tolist() for vectors in embedded]


if __name__ == "__main__":
    for line in sys.stdin:
        question = json.loads(line)
        compute = {"muvera": muvera, "pooled": pooled, "colbert": colbert}[question.pop("of")]
        sys.stdout.write(json.dumps(compute(**question)) + "\n")
        sys.stdout.flush()
