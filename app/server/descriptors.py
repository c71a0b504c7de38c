"""Whether the process may open another file or connection."""

import errno
import os

_USED_UP = {errno.EMFILE, errno.ENFILE}


def descriptors_used_up(descriptor: int) -> bool:
    """Whether there is no descriptor left beside `descriptor`, an open one: asked by copying it.

    The event loop meets the limit without a word: it accepts the next caller and hangs up.
    """
    try:
        os.close(os.dup(descriptor))
    except OSError as error:
        return error.errno in _USED_UP
    return False
