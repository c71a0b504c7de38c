"""MessagePack: every type of the specification, limits, and numpy arrays."""

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.message_pack import TooManyValuesError, pack, unpack
from tests.support.formats import from_message_pack

MANY = 1_000_000


def packed(value: Any) -> bytes:
    return b"".join(pack(value))


# The bytes of each type, as the specification has them.
@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"\xc0", None),
        (b"\xc2", False),
        (b"\xc3", True),
        (b"\x7f", 127),
        (b"\xe0", -32),
        (b"\xff", -1),
        (b"\xcc\xff", 255),
        (b"\xcd\xff\xff", 65_535),
        (b"\xce\xff\xff\xff\xff", 2**32 - 1),
        (b"\xcf" + b"\xff" * 8, 2**64 - 1),
        (b"\xd0\x80", -128),
        (b"\xd1\x80\x00", -(2**15)),
        (b"\xd2\x80\x00\x00\x00", -(2**31)),
        (b"\xd3\x80" + bytes(7), -(2**63)),
        (b"\xca\x3f\xc0\x00\x00", 1.5),
        (b"\xcb\x3f\xf8" + bytes(6), 1.5),
        (b"\xa0", ""),
        (b"\xbf" + b"a" * 31, "a" * 31),
        (b"\xd9\x02\xc3\xa9", "é"),
        (b"\xda\x01\x00" + b"a" * 256, "a" * 256),
        (b"\xdb\x00\x01\x00\x00" + b"a" * 65_536, "a" * 65_536),
        (b"\xc4\x01\xff", b"\xff"),
        (b"\xc5\x01\x00" + b"a" * 256, b"a" * 256),
        (b"\xc6\x00\x01\x00\x00" + b"a" * 65_536, b"a" * 65_536),
        (b"\x90", []),
        (b"\x9f" + b"\x01" * 15, [1] * 15),
        (b"\xdc\x00\x10" + b"\x01" * 16, [1] * 16),
        (b"\xdd\x00\x00\x00\x01\xc0", [None]),
        (b"\x80", {}),
        (b"\x82\xa1a\x91\x01\xa1b\x80", {"a": [1], "b": {}}),
        (b"\xde\x00\x01\xc4\x02nd\xc3", {b"nd": True}),
        (b"\xdf\x00\x00\x00\x01\xa1a\xc0", {"a": None}),
    ],
)
def test_every_type_of_the_specification_is_read(content: bytes, value) -> None:
    found = unpack(content, MANY)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it ends too early"),
        (b"\xcd\x01", "it ends too early"),
        (b"\xdd\xff\xff\xff\xff", "it ends too early"),
        (b"\xdb\xff\xff\xff\xffab", "it ends too early"),
        (b"\xdf\xff\xff\xff\xff\xa1a", "it ends too early"),
        (b"\xc0\xc0", "it ends at byte 1, and more follows"),
        (b"\x91\xc1", "byte 2 begins an extension"),
        (b"\xd4\x01\x00", "byte 1 begins an extension"),
        (b"\xc9\x00\x00\x00\x01\x01\x00", "byte 1 begins an extension"),
        (b"\xa1\xff", "invalid start byte"),
        (b"\x81\x01\x01", "a key of a map is no string"),
        (b"\x91" * 34 + b"\x01", "it is nested more than 32 deep"),
    ],
)
def test_other_bytes_are_refused_in_words(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(content, MANY)


def test_values_are_counted_before_more_are_made() -> None:
    assert unpack(b"\x93\x01\x02\x03", 4) == [1, 2, 3]
    for content in (
        b"\x93\x01\x02\x03",
        b"\x81\xa1a\x91\x01",
        b"\xdd\x00\x80\x00\x00" + b"\xc0" * 8_388_608,
    ):
        with pytest.raises(TooManyValuesError):
            unpack(content, 3)


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
LEAVES |= st.text() | st.binary()


@given(st.recursive(LEAVES, lambda part: st.lists(part) | st.dictionaries(st.text(), part)))
def test_what_is_written_is_read(value) -> None:
    assert unpack(packed(value), MANY) == value


@given(st.binary())
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        unpack(content, 100)
    except ValueError:
        return


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "uint8", "int32"])
@pytest.mark.parametrize("shape", [(0,), (3,), (2, 3)])
def test_arrays_are_written_as_msgpack_numpy_does(dtype, shape) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    written = packed({"values": array[::-1]})
    assert unpack(written, MANY)["values"] == {
        b"nd": True,
        b"type": array.dtype.str,
        b"kind": b"",
        b"shape": list(shape),
        b"data": array[::-1].tobytes(),
    }
    np.testing.assert_array_equal(from_message_pack(written)["values"], array[::-1])


def test_numbers_of_numpy_are_written_as_floats() -> None:
    assert packed(np.float32(0.25)) == b"\xcb" + struct.pack(">d", 0.25)
