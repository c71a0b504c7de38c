"""Record what FastEmbed and PyLate make of some vectors, for where they are not installed.

    python -m tests.vectors.record_references

needs the environment that scripts/check_references.sh makes.
"""

import json
from pathlib import Path

import numpy as np

from tests.vectors.references import run_references

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
    muvera, pooled = {}, {}
    with run_references() as references:
        for tokens, width in SHAPES:
            vectors = vectors_of(tokens, width)
            muvera[f"{tokens}x{width}"] = {
                side: references.muvera(vectors, side)[::STEP].round(7).tolist()
                for side in ("query", "document")
            }
        for factor in FACTORS:
            pooled[str(factor)] = references.pool(vectors_of(70, 48), factor).round(7).tolist()
    REFERENCES.write_text(json.dumps({"muvera": muvera, "pooled": pooled}))


if __name__ == "__main__":
    record()
