"""The end of a listening socket, without hanging up on those whom the kernel has let in.

A connection is complete, and its request may be sent, before anybody accepts it. Closing the socket
resets all of those that wait; so new ones are kept out first, and those that wait are accepted.
"""

import ctypes
import os
import select
import socket
import struct
import sys
from typing import Protocol

# A program in classic BPF for the kernel's socket filter: (operation, jump if true, if false, k).
_LOAD_BYTE, _JUMP_IF_SET, _RETURN = 0x30, 0x45, 0x06
_TCP_FLAGS, _SYN, _WHOLE = 13, 0x02, 0xFFFF_FFFF
_DROP_SYN = (
    (_LOAD_BYTE, 0, 0, _TCP_FLAGS),
    (_JUMP_IF_SET, 0, 1, _SYN),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, _WHOLE),
)
_SO_ATTACH_FILTER = 26


class Listener(Protocol):
    """A listening socket, as the event loop shows it."""

    def fileno(self) -> int:
        """Its descriptor."""
        ...


def keep_newcomers_out(listener: Listener) -> None:
    """Let nobody begin a connection any more; those that have begun stay.

    On Linux a newcomer's first packet (SYN) is dropped: his system sends it again after a second,
    and finds the port closed. Elsewhere no more are let in than are waiting.
    """
    with socket.socket(fileno=os.dup(listener.fileno())) as own:
        if sys.platform != "linux" or not _drop_syn(own):
            own.listen(0)


def has_callers(listener: Listener) -> bool:
    """Whether connections wait to be accepted."""
    if not hasattr(select, "poll"):
        return False
    poll = select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _drop_syn(listener: socket.socket) -> bool:
    """Attach the filter; whether the kernel takes it."""
    program = b"".join(struct.pack("HBBI", *step) for step in _DROP_SYN)
    memory = ctypes.create_string_buffer(program, len(program))
    option = struct.pack("@HP", len(_DROP_SYN), ctypes.addressof(memory))
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)
    except OSError:  # Some sandboxes have no filters.
        return False
    return True
