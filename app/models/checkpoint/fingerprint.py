"""Identifies the contents of a model's files, because two models may have the same name."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.errors import StartupError

# Where the hub's library keeps what it fetched, each commit in a folder of that name.
_COMMITS = "snapshots"
_FILES = {".json", ".safetensors", ".bin", ".pt", ".txt", ".model"}


def fingerprint(folder: Path) -> str:
    """The commit of a model from the hub, or a digest of the files that make a model.

    Reads all of them; the digest does not depend on the folder. Raises `StartupError` for a file
    that cannot be read.
    """
    if folder.parent.name == _COMMITS:
        return folder.name
    digest = hashlib.sha256()
    try:
        for path in sorted(each for each in folder.rglob("*") if each.suffix in _FILES):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.relative_to(folder).as_posix()!r} {content}\n".encode())
    except OSError as error:
        raise StartupError(f"the model in {folder} cannot be read: {error}") from error
    return digest.hexdigest()


def start_fingerprints(folders: Sequence[Path]) -> Callable[[], list[str]]:
    """Begin to read the files of these folders; return a function that waits for fingerprints."""
    beside = ThreadPoolExecutor(1, "fingerprint")
    prints = [beside.submit(fingerprint, folder) for folder in folders]
    beside.shutdown(wait=False)
    return lambda: [each.result() for each in prints]
