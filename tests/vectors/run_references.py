"""Runs in an environment of its own: FastEmbed's MUVERA and PyLate's pooling.

Each line that it reads is `{"of": "muvera" | "pooled", "vectors": [[...]], ...}`; the line that
answers it holds the vectors that are made of them.
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


def muvera(vectors: np.ndarray, side: str) -> np.ndarray:
    encode = {"query": Muvera.process_query, "document": Muvera.process_document}[side]
    return encode(encoder(vectors.shape[1]), vectors)


def pooled(vectors: np.ndarray, factor: int) -> np.ndarray:
    """A method that reads nothing of its object."""
    documents = [torch.from_numpy(vectors)]
    (own,) = ColBERT.pool_embeddings_hierarchical(None, documents, factor, protected_tokens=0)
    return own.numpy()


if __name__ == "__main__":
    for line in sys.stdin:
        question = json.loads(line)
        make = {"muvera": muvera, "pooled": pooled}[question.pop("of")]
        given = np.array(question.pop("vectors"), np.float32)
        sys.stdout.write(json.dumps(make(given, **question).tolist()) + "\n")
        sys.stdout.flush()
