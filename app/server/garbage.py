"""Python's garbage collector: rare during the start, and blind to what the start brought."""

import gc

# New objects before the youngest are looked through, and so on for the older ones.
_RARELY = (20_000, 1000, 1000)
_USUALLY = gc.get_threshold()


def collect_rarely() -> None:
    """While libraries and models come, which stay: looking at them again and again costs 0.4 s."""
    gc.set_threshold(*_RARELY)


def spare_what_stays() -> None:
    """Pass over all that is there, and collect as usual from now on.

    These are 400,000 objects and more, and looking at all of them stopped every thread for 0.3
    seconds, /health included, whenever a full collection fell due.
    """
    gc.freeze()
    gc.set_threshold(*_USUALLY)
