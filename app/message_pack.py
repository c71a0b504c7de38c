"""Reads and writes MessagePack, with numpy arrays as the maps of msgpack-numpy.

The reader counts each value before it makes it, and stops above a limit: a few megabytes can hold
millions of values, which would block the event loop. The library msgpack has no such limit, and it
interns the keys of maps, which early releases of Python 3.12 never free.
"""

import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

MESSAGE_PACK: Final = "application/msgpack"
_MOST_NESTED = 32
# Values by their code.
_VALUES: dict[int, Any] = {code: code for code in range(0x80)}
_VALUES |= {0xE0 + index: index - 0x20 for index in range(0x20)}
_VALUES |= {0xC0: None, 0xC2: False, 0xC3: True}
# The formats of the numbers behind a code.
_NUMBERS = {0xCA + index: struct.Struct(f">{letter}") for index, letter in enumerate("fdBHIQbhiq")}
# Kinds of values with their length, or the number of bytes behind the code that hold it.
_KINDS: dict[int, tuple[type, int, int]] = {0xA0 + n: (str, n, 0) for n in range(0x20)}
_KINDS |= {0x80 + n: (dict, n, 0) for n in range(0x10)}
_KINDS |= {0x90 + n: (list, n, 0) for n in range(0x10)}
_KINDS |= {0xC4: (bytes, 0, 1), 0xC5: (bytes, 0, 2), 0xC6: (bytes, 0, 4)}
_KINDS |= {0xD9: (str, 0, 1), 0xDA: (str, 0, 2), 0xDB: (str, 0, 4)}
_KINDS |= {0xDC: (list, 0, 2), 0xDD: (list, 0, 4), 0xDE: (dict, 0, 2), 0xDF: (dict, 0, 4)}


class TooManyValuesError(ValueError):
    """The content holds more values than allowed."""


def unpack(content: bytes, max_values: int) -> Any:
    """Read a value; raise `ValueError` for anything but one complete value without extensions."""
    reader = _Reader(content, max_values)
    value = reader.read()
    if reader.position != len(content):
        raise ValueError(f"it ends at byte {reader.position}, and more follows")
    return value


class _Reader:
    def __init__(self, content: bytes, max_values: int) -> None:
        self.position = 0
        self._content, self._values_left = content, max_values

    def read(self, depth: int = 0) -> Any:
        self._values_left -= 1
        if self._values_left < 0:
            raise TooManyValuesError
        if depth > _MOST_NESTED:
            raise ValueError(f"it is nested more than {_MOST_NESTED} deep")
        (code,) = self._take(1)
        if code in _VALUES:
            return _VALUES[code]
        if code in _NUMBERS:
            return _NUMBERS[code].unpack(self._take(_NUMBERS[code].size))[0]
        if code not in _KINDS:
            raise ValueError(f"byte {self.position} begins an extension")
        kind, length, size = _KINDS[code]
        length += int.from_bytes(self._take(size))
        if kind is list:
            return [self.read(depth + 1) for _ in range(length)]
        if kind is dict:
            return dict(self._read_pair(depth + 1) for _ in range(length))
        content = self._take(length)
        return content.decode() if kind is str else content

    def _read_pair(self, depth: int) -> tuple[str | bytes, Any]:
        key = self.read(depth)
        if not isinstance(key, str | bytes):
            raise ValueError("a key of a map is no string")  # noqa: TRY004 - of the content
        return key, self.read(depth)

    def _take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self._content):
            raise ValueError("it ends too early")
        return self._content[start : self.position]


def pack(value: Any) -> Iterator[bytes | memoryview]:
    """Write a value in chunks; arrays are not copied."""
    match value:
        case None | bool():
            yield {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
        case int():
            yield b"\xd3" + struct.pack(">q", value)
        case float() | np.floating():
            yield b"\xcb" + struct.pack(">d", value)
        case str():
            text = value.encode()
            yield b"\xdb" + struct.pack(">I", len(text)) + text
        case bytes() | memoryview():
            yield b"\xc6" + struct.pack(">I", len(value))
            yield value
        case dict():
            yield b"\xdf" + struct.pack(">I", len(value))
            for key, item in value.items():
                yield from pack(key)
                yield from pack(item)
        case np.ndarray():
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            shape = list(value.shape)
            about = {b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": shape}
            yield from pack(about | {b"data": data})
        case _:
            yield b"\xdd" + struct.pack(">I", len(value))
            for item in value:
                yield from pack(item)
