"""Identifies the weights of a model by a digest of the numbers in its tensors.

The digest of a tensor is computed while it is read, from its numbers in float32, so that it is the
same in another container, a wider format, other shards or another folder. It does not protect
against checkpoints that were made to collide.
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
# The most numbers that PyTorch converts without its thread pool. Its setting for the number of
# threads would also apply to threads that start meanwhile.
_CONVERTED_BY_ONE_THREAD = 2**15 - 1

_recorded: ContextVar["WeightDigests | None"] = ContextVar("digests", default=None)


@dataclass(frozen=True, slots=True)
class WeightDigests:
    """The digests of the tensors that were read from the model in `folder`, by name.

    The name of a tensor in a subfolder begins with the subfolder's name.
    """

    folder: Path
    tensors: dict[str, bytes] = field(default_factory=dict)

    def qualify(self, folder: Path, name: str) -> str:
        """Return the name of a tensor of a file in `folder`."""
        if folder == self.folder:
            return name
        # Resolved, because modules.json may have an absolute path.
        below = folder.resolve().relative_to(self.folder.resolve())
        return (below / name).as_posix()

    def combine(self, names: Iterable[str], *others: object) -> bytes:
        """Compute the digest of these tensors, and of the `repr` of `others`."""
        lines = [f"{name!r} {self.tensors[name].hex()}" for name in sorted(names)]
        return xxh3_128_digest("\n".join([*lines, *map(repr, others)]).encode())


@contextmanager
def record_digests(folder: Path) -> Iterator[WeightDigests]:
    """Record the tensors that are found in the block, and read there or later."""
    digests = WeightDigests(folder)
    token = _recorded.set(digests)
    try:
        yield digests
    finally:
        _recorded.reset(token)


def recorded_digests() -> WeightDigests | None:
    """Return the digests of the enclosing `record_digests`, if there is one."""
    return _recorded.get()


class TensorDigest:
    """Computes the digest of one tensor; several threads may add parts of it."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = [*shape]
        self._blocks = [b""] * -(-shape.numel() // _BLOCK)

    def add(self, start: int, values: Tensor) -> None:
        """Add the numbers from `start` on; parts begin and end with a block."""
        for number, block in enumerate(torch.split(values, _BLOCK), start // _BLOCK):
            exact = block
            if block.dtype is not torch.float32:
                exact = torch.empty(len(block), dtype=torch.float32)
                copy_in_this_thread(exact, block)
            self._blocks[number] = xxh3_128_digest(exact.numpy())  # type: ignore[arg-type]

    def finish(self) -> bytes:
        """Return the digest."""
        return xxh3_128_digest(b"".join([repr(self._shape).encode(), *self._blocks]))


def copy_in_this_thread(target: Tensor, source: Tensor) -> None:
    """Copy and convert numbers `[n]` without the thread pool of PyTorch."""
    parts = (torch.split(tensor, _CONVERTED_BY_ONE_THREAD) for tensor in (target, source))
    for converted, exact in zip(*parts, strict=True):
        converted.copy_(exact)


def encode_short(digest: bytes, length: int) -> str:
    """Encode a digest in base 32, and return its first `length` characters."""
    return b32encode(digest).decode().lower()[:length]
