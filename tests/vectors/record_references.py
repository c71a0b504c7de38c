"""Record what FastEmbed and PyLate make of the vectors that the tests use.

    python -m tests.vectors.record_references

needs fastembed 0.9.1 and pylate 1.6.0, which do not install beside the service's own packages.
"""

import json
from pathlib import Path

import numpy as np

REFERENCES = Path(__file__).with_name("references.json")
# Every so many numbers of an encoding are recorded, so that each repetition is met.
STEP = 97
SHAPES = [(1, 16), (5, 48), (70, 48), (12, 1024)]
FACTORS = [2, 3, 50]


def vectors_of(tokens: int, width: int) -> np.ndarray:
    """Unit vectors in a few directions, so that there is something to cluster."""
    random = np.random.default_rng(tokens * width)
    centers = random.standard_normal((8, width))
    vectors = centers[random.integers(8, size=tokens)] + 0.4 * random.standard_normal(
        (tokens, width)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def record() -> None:
    # The tests, which use the vectors above, run without them.
    import torch  # noqa: PLC0415
    from fastembed.postprocess import Muvera  # noqa: PLC0415
    from pylate.models import ColBERT  # noqa: PLC0415

    muvera, pooled = {}, {}
    for tokens, width in SHAPES:
        vectors, encoder = vectors_of(tokens, width), Muvera(width)
        muvera[f"{tokens}x{width}"] = {
            "query": encoder.process_query(vectors)[::STEP].round(7).tolist(),
            "document": encoder.process_document(vectors)[::STEP].round(7).tolist(),
        }
    for factor in FACTORS:
        vectors = torch.from_numpy(vectors_of(70, 48))
        (own,) = ColBERT.pool_embeddings_hierarchical(None, [vectors], factor, protected_tokens=0)
        pooled[str(factor)] = own.numpy().round(7).tolist()
    REFERENCES.write_text(json.dumps({"muvera": muvera, "pooled": pooled}))


if __name__ == "__main__":
    record()
