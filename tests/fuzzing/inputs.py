"""Helpers of the targets: cut an input into pieces, check errors, limit calls and memory.

An input is CONTROL bytes, which seed the random choices of a target, and its content.
"""

import importlib
import itertools
import random
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The parsers that are fuzzed; the module of a target is imported only when it is loaded.
MODULES = {
    "heads": "request_heads",
    "bodies": "json_bodies",
    "checkpoints": "safetensors_files",
    "answers": "safetensors_files",
}
CONTROL = 2
# One in so many inputs is measured, which takes ten times as long.
_MEASURED = 64
_LONGEST_SENTENCE = 2500
# Memory for each byte of the content, as documented, and besides, less than the documented 50 MiB.
_BYTES_PER_BYTE, _BYTES_BESIDE = 20, 1 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """A parser: `seeds` are the first inputs, and `check` raises for an input that fails.

    `longest` is the maximum length in bytes.
    """

    seeds: Callable[[], Iterator[bytes]]
    check: Callable[[bytes], None]
    longest: int = 4096


def load(name: str) -> Target:
    """Import the module of a target."""
    found: Target = importlib.import_module(f"tests.fuzzing.{MODULES[name]}").TARGETS[name]
    return found


def seeds_of(contents: Iterable[bytes]) -> Iterator[bytes]:
    """Yield two inputs for each content, with different control bytes."""
    for content in contents:
        yield bytes(CONTROL) + content
        yield zlib.crc32(content).to_bytes(4, "little")[:CONTROL] + content


def read_input(data: bytes) -> tuple[random.Random, bytes]:
    """Return a random generator seeded by the control bytes, and the content."""
    return random.Random(data[:CONTROL]), data[CONTROL:]


def cut(content: bytes, chance: random.Random) -> list[bytes]:
    """Cut the content: not at all, byte by byte, or into pieces of random sizes."""
    size = chance.choice([len(content) + 1, 1, 7, 100, 1000])
    pieces = []
    while content:
        length = 1 + chance.randrange(size)
        pieces.append(content[:length])
        content = content[length:]
    return pieces


def check_sentence(error: Exception) -> None:
    """Check that the error is one printable line of a limited length."""
    sentence = str(error)
    assert sentence, repr(error)
    assert sentence.isprintable(), repr(sentence)
    assert len(sentence.encode()) <= _LONGEST_SENTENCE, sentence[:300]


@contextmanager
def linear(content: bytes, calls_per_byte: float, calls_beside: int = 20_000) -> Iterator[None]:
    """Fail if the block makes too many calls, of Python or C, or takes too much memory.

    With instrumentation a branch is a call, too.
    """
    if zlib.crc32(content) % _MEASURED:
        yield
        return
    calls = itertools.count()

    def count(_frame: Any, event: str, _argument: Any) -> None:
        if event in {"call", "c_call"}:
            next(calls)

    tracemalloc.start()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    called = next(calls)
    assert called <= calls_beside + calls_per_byte * len(content), f"{called} calls"
    assert peak <= _BYTES_BESIDE + _BYTES_PER_BYTE * len(content), f"{peak} bytes"


def outcome(read: Callable[[], Any], *refusals: type[Exception]) -> tuple[Any, Exception | None]:
    try:
        return read(), None
    except refusals as error:
        return None, error


def count_plainly(content: bytes) -> tuple[int, int]:
    """Count commas, colons and opening brackets outside strings, and all bytes there.

    A backslash outside strings, which JSON has not, escapes as within; a last one escapes nothing.
    """
    values = outside = 0
    in_string = is_escaped = False
    for byte in content:
        if is_escaped and byte in b'\\"':
            is_escaped = False
            outside += not in_string
            continue
        is_escaped = byte == ord("\\")
        if byte == ord('"'):
            in_string = not in_string
        elif not in_string:
            outside += 1
            values += byte in b",:[{"
    outside -= is_escaped and not in_string
    return values, outside
