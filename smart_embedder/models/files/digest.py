"""Identifies the weights of a model by a digest of the numbers in its tensors.

The digest of a tensor is computed while it is read, from its numbers in float32, so that it is the
same in another container, a wider format, other shards or another folder. It does not protect
against checkpoints that were made to collide.
"""

from base64 import b32encode

import torch
from torch import Tensor
from xxhash import xxh3_128_digest

# Numbers of a tensor that are hashed together.
_BLOCK = 2**17
# The most numbers that PyTorch converts without its thread pool. Its setting for the number of
# threads would also apply to threads that start meanwhile.
_CONVERTED_BY_ONE_THREAD = 2**15 - 1


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
