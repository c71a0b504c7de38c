"""Memory that the allocator keeps after it was freed."""

import ctypes
import sys
from contextlib import suppress


def trim_heap() -> None:
    """Give it back to the system, where the allocator can."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # glibc alone has it.
            ctypes.CDLL(None).malloc_trim(0)
