"""Calls a function in a fork of this process, which has imported everything already."""

import json
import os
import traceback
from collections.abc import Callable
from typing import Any


def run_forked(call: Callable[[], Any]) -> Any:
    """Return the result, as JSON has it; fails if the call does.

    A fork has no thread of PyTorch, so that the call may compute nothing large.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        status = 1
        try:
            os.write(writer, json.dumps(call()).encode())
            status = 0
        except BaseException:  # noqa: BLE001 - none may return into the tests of the parent
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as results:
        result = results.read()
    _, ended = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended) == 0
    return json.loads(result)
