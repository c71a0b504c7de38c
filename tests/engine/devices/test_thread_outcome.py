import pytest

from smart_embedder.engine.devices.thread import outcome_of


def test_what_is_returned_is_the_outcome() -> None:
    assert outcome_of(lambda: 3) == 3


def test_an_error_is_an_outcome() -> None:
    error = ValueError("no")

    def fail() -> None:
        raise error

    assert outcome_of(fail) is error


def test_an_interrupt_is_none() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outcome_of(interrupt)
