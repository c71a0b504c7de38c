"""Returns freed memory to the system."""

import ctypes
import sys
from contextlib import suppress


def trim_heap() -> None:
    """Return memory that the allocator keeps after it was freed, if the allocator can."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # glibc alone has it.
            ctypes.CDLL(None).malloc_trim(0)
