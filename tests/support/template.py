"""The process that servers are copies of: `python -m tests.support.template SOCKET`.

It imports what every start imports, and runs nothing of it: a thread of PyTorch's would not be
copied. A message on the socket (a descriptor) asks for a copy. With it come the descriptors of the
copy's output, and of another socket that is told its process id and its exit status.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

# With what these import in turn. uvicorn imports the last ones when its loop begins.
_IMPORTED_BY_A_START = (
    "smart_embedder.main",
    "smart_embedder.models.loader",
    "smart_embedder.server.process",
    "uvicorn.lifespan.on",
    "uvicorn.loops.auto",
    "uvloop",
)
_MESSAGE_BYTES = 65_536


def _wait_for_a_start(requests: socket.socket) -> dict[str, Any] | None:
    """Return in a copy, with what it is to run, and None in the template when the tests end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the copies' parents.
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
        if not message:
            return None
        if not os.fork():
            requests.close()
            _become_a_copy(*descriptors)
            return dict(json.loads(message))
        for each in descriptors:
            os.close(each)


def _become_a_copy(output: int, status: int) -> None:
    """Return in a new process; this one stays, waits for its end and tells its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    copy = os.fork()
    if copy:
        os.close(output)
        os.write(status, str(copy).encode())
        _, ended = os.waitpid(copy, 0)
        with suppress(OSError):  # The tests have ended.
            os.write(status, str(os.waitstatus_to_exitcode(ended)).encode())
        os._exit(0)
    os.close(status)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)


def main() -> None:
    """Make copies of this process; in a copy, run what was asked for."""
    for name in _IMPORTED_BY_A_START:
        importlib.import_module(name)
    start = _wait_for_a_start(socket.socket(fileno=int(sys.argv[1])))
    if start is None:
        return
    os.chdir(start["folder"])
    os.environ.clear()
    os.environ.update(start["environment"])
    sys.path[0] = start["folder"]
    module, *sys.argv[1:] = start["arguments"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
