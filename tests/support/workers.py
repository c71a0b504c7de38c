"""Starts the workers of pytest-xdist as copies of one process that has imported torch.

Each worker would otherwise import the same packages for seconds. They may not be of this project,
whose lines `--coverage` counts.

    python -P workers.py LISTENER LIFELINE    is the process that is copied
    python -P workers.py -u ...               stands in for Python where xdist starts a worker
"""

import atexit
import gc
import importlib
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from types import ModuleType
from typing import Any

_IMPORTED = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.modeling_layers",
    "transformers.models.auto.modeling_auto",
    "sentence_transformers",
    "scipy.sparse",
    "fastapi",
    "aiohttp",
)
# The variable with the address of the socket that takes requests for copies.
_ADDRESS = "TEMPLATE_OF_WORKERS"
_LINE = "import sys;exec(eval(sys.stdin.readline()))"  # What execnet lets its processes run.


def offer_workers(specs: list[Any]) -> None:
    """Let xdist start these workers as copies, until this process ends."""
    folder = tempfile.mkdtemp(prefix="workers-")
    os.environ[_ADDRESS] = f"{folder}/template"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.environ[_ADDRESS])
    listener.listen()
    held, lifeline = os.pipe()
    program = [sys.executable, "-P", __file__]
    with listener:
        numbers = [listener.fileno(), held]
        template = subprocess.Popen([*program, *map(str, numbers)], pass_fds=numbers)
    os.close(held)
    for spec in specs:
        spec.python = shlex.join(program)

    def end() -> None:
        os.close(lifeline)
        template.wait()
        shutil.rmtree(folder)

    atexit.register(end)


def _be_copied(listener: socket.socket, lifeline: int) -> None:
    """Make copies until the other end of the lifeline, a pipe, is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the copies.
    while lifeline not in select.select([listener.fileno(), lifeline], [], [])[0]:
        connection, _ = listener.accept()
        _, descriptors, *_ = socket.recv_fds(connection, 1, 3)
        if not os.fork():
            listener.close()
            os.close(lifeline)
            _work(descriptors)
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _work(descriptors: list[int]) -> None:
    """Run a worker in this process, with these descriptors for its input, output and errors."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    gc.enable()
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(_LINE, vars(main))
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


def _run_worker() -> None:
    """Ask for a copy with the descriptors of this process, and wait until it has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ[_ADDRESS])
        socket.send_fds(connection, [b"0"], [0, 1, 2])
        connection.recv(1)


if __name__ == "__main__":
    if sys.argv[1] == "-u":  # As execnet calls Python.
        _run_worker()
    else:
        _be_copied(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
