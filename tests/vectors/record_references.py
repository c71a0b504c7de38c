"""Record what FastEmbed and PyLate make of some vectors, for where they are not installed.

    python -m tests.vectors.record_references

needs the environment that scripts/check_references.sh makes.
"""

import json

from tests.vectors.references import run_references
from tests.vectors.test_vectors import FACTORS, REFERENCES, SHAPES, STEP, vectors_of


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
