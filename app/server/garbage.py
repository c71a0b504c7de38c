"""Python's garbage collector: rare during the start, and without what the start allocated."""

import gc

# Allocations before a collection of the youngest generation, and collections before the older ones.
_STARTUP_THRESHOLD = (20_000, 1000, 1000)
_DEFAULT_THRESHOLD = gc.get_threshold()


def collect_rarely() -> None:
    """Collect rarely while libraries and models load: their objects stay, and scans cost 0.4 s."""
    gc.set_threshold(*_STARTUP_THRESHOLD)


def freeze_startup_objects() -> None:
    """Exclude every present object from collections, and collect as usual from now on.

    These are more than 400,000 objects; a full collection that scanned them stopped every thread
    for 0.3 seconds, /health included.
    """
    gc.freeze()
    gc.set_threshold(*_DEFAULT_THRESHOLD)
