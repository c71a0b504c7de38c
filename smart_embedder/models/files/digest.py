"""Identifies what was read of a model: the numbers of its tensors, whatever format they lie in.

A tensor's digest is made while it is read, of its numbers in float32, so that another container, a
wider format, other shards or another folder change nothing. It is no protection against people who
make two checkpoints alike on purpose.
"""

from base64 import b32encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

# Numbers of a tensor that are hashed together.
_BLOCK = 2**17
# Numbers that PyTorch converts without its pool of threads. To set their number would set it for
# every thread that begins meanwhile, too.
_CONVERTED_BY_ONE = 2**15 - 1

_noted: ContextVar["Content | None"] = ContextVar("content", default=None)


@dataclass(frozen=True, slots=True)
class Content:
    """The digests of the tensors that were read of the model in `folder`, by name.

    The name of a tensor in a folder below that of the model begins with it.
    """

    folder: Path
    tensors: dict[str, bytes] = field(default_factory=dict)

    def name(self, folder: Path, name: str) -> str:
        """The name of a tensor of a file in that folder."""
        if folder == self.folder:
            return name
        # One may be absolute in modules.json, and the other not.
        below = folder.resolve().relative_to(self.folder.resolve())
        return (below / name).as_posix()

    def digest(self, names: Iterable[str], *others: object) -> bytes:
        """Of these tensors, and of what represents `others`."""
        lines = [f"{name!r} {self.tensors[name].hex()}" for name in sorted(names)]
        return xxh3_128_digest("\n".join([*lines, *map(repr, others)]).encode())


@contextmanager
def noting(folder: Path) -> Iterator[Content]:
    """Note the tensors that are found within the block, and read there or later."""
    content = Content(folder)
    token = _noted.set(content)
    try:
        yield content
    finally:
        _noted.reset(token)


def noted() -> Content | None:
    """The content that is noted at present, if any is."""
    return _noted.get()


class TensorDigest:
    """Of the numbers of one tensor, which may be added part by part by several threads."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = [*shape]
        self._blocks = [b""] * -(-shape.numel() // _BLOCK)

    def add(self, start: int, values: Tensor) -> None:
        """Add the numbers from `start` on, which is where a block begins; a part ends one."""
        for number, block in enumerate(torch.split(values, _BLOCK), start // _BLOCK):
            exact = block
            if block.dtype is not torch.float32:
                exact = torch.empty(len(block), dtype=torch.float32)
                copy_by_one(exact, block)
            self._blocks[number] = xxh3_128_digest(exact.numpy())  # type: ignore[arg-type]

    def finish(self) -> bytes:
        """The digest."""
        return xxh3_128_digest(b"".join([repr(self._shape).encode(), *self._blocks]))


def copy_by_one(target: Tensor, source: Tensor) -> None:
    """Copy and convert numbers, `[n]`, in the calling thread alone."""
    parts = (torch.split(each, _CONVERTED_BY_ONE) for each in (target, source))
    for converted, exact in zip(*parts, strict=True):
        converted.copy_(exact)


def short(digest: bytes, length: int) -> str:
    """The first letters and digits of a digest as text."""
    return b32encode(digest).decode().lower()[:length]
