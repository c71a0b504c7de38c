"""The process that servers are copied from: `python -m tests.support.template LISTENER LIFELINE`.

It imports what every start imports, and runs nothing of it, because a fork does not copy threads. A
message on a connection to the listener (a descriptor, as the lifeline) requests a copy, and brings
the descriptor of the copy's output. The copy's process id and its exit status are sent back. The
template exits when the other end of the lifeline, a pipe, is closed.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

# And everything that these import. uvicorn imports the last ones when its loop begins.
_IMPORTED_BY_A_START = (
    "app.main",
    "smart_embedder.models.loader",
    "app.run",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvloop",
)
_MESSAGE_BYTES = 65_536


def _wait_for_a_start(listener: socket.socket, lifeline: int) -> dict[str, Any] | None:
    """Return in a copy, with the requested start, or None in the template when the tests end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The parents of copies are not waited for.
    while True:
        ready, *_ = select.select([listener.fileno(), lifeline], [], [])
        if lifeline in ready:
            return None
        connection, _ = listener.accept()
        message, descriptors, *_ = socket.recv_fds(connection, _MESSAGE_BYTES, 1)
        if descriptors and not os.fork():
            listener.close()
            os.close(lifeline)
            _become_copy(*descriptors, connection)
            return dict(json.loads(message))
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _become_copy(output: int, connection: socket.socket) -> None:
    """Return in a new process; this one waits for it, and sends its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    copy = os.fork()
    if copy:
        os.close(output)
        connection.send(str(copy).encode())
        _, ended = os.waitpid(copy, 0)
        with suppress(OSError):  # The tests have ended.
            connection.send(str(os.waitstatus_to_exitcode(ended)).encode())
        os._exit(0)
    connection.close()
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)


def main() -> None:
    """Make copies of this process; in a copy, run the requested module."""
    gc.disable()
    for name in _IMPORTED_BY_A_START:
        importlib.import_module(name)
    gc.freeze()  # A collection in a copy would copy the memory of all imported modules.
    gc.enable()
    listener, lifeline = map(int, sys.argv[1:])
    start = _wait_for_a_start(socket.socket(fileno=listener), lifeline)
    if start is None:
        return
    os.chdir(start["folder"])
    os.environ.clear()
    os.environ.update(start["environment"])
    sys.path[0] = start["folder"]
    module, *sys.argv[1:] = start["arguments"]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code is not None and not isinstance(ended.code, int):
            raise  # A sentence, which Python prints.
        _end(ended.code or 0)
    _end(0)


def _end(status: int) -> NoReturn:
    """Exit as Python does, without freeing imported modules, whose memory would be copied."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
