"""Runs in an environment of its own: FastEmbed's MUVERA, and PyLate's pooling and models.

Each line that it reads is `{"of": "muvera" | "pooled" | "colbert", ...}`; the line that answers it
holds the vectors that are made of the `vectors` in it, or of its `texts`.
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
    """A method that reads nothing of its object."""
    documents = [torch.tensor(vectors, dtype=torch.float32)]
    (own,) = ColBERT.pool_embeddings_hierarchical(None, documents, factor, protected_tokens=0)
    return own.tolist()


@cache
def model(folder: str) -> ColBERT:
    return ColBERT(folder, device="cpu")


def colbert(folder: str, texts: list[str], side: str) -> list[list[list[float]]]:
    made = model(folder).encode(texts, is_query=side == "query", show_progress_bar=False)
    return [vectors.tolist() for vectors in made]


if __name__ == "__main__":
    for line in sys.stdin:
        question = json.loads(line)
        make = {"muvera": muvera, "pooled": pooled, "colbert": colbert}[question.pop("of")]
        sys.stdout.write(json.dumps(make(**question)) + "\n")
        sys.stdout.flush()
