"""The garbage collector during the start and afterwards."""

import gc

from smart_embedder.server.process import collect_rarely, freeze_startup_objects


def test_the_start_is_spared_and_what_comes_later_is_collected() -> None:
    usual = gc.get_threshold()
    collect_rarely()
    try:
        assert gc.get_threshold() > usual
        tracked = len(gc.get_objects())
        freeze_startup_objects()
        assert gc.get_freeze_count() > 0.9 * tracked
        assert gc.get_threshold() == (700, 10, 10)
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
