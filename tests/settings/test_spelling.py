"""How far names are apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.settings.spelling import distance, nearest

names = st.text("ABCD_", max_size=12)


@pytest.mark.parametrize(
    ("name", "other", "letters"),
    [
        ("PORT", "PORT", 0),
        ("PROT", "PORT", 1),
        ("POR", "PORT", 1),
        ("PORTS", "PORT", 1),
        ("", "PORT", 4),
        ("HOME", "HOST", 2),
    ],
)
def test_letters_that_differ_are_counted(name: str, other: str, letters: int) -> None:
    assert distance(name, other) == letters


@given(names, names)
def test_a_distance_is_the_same_both_ways_and_0_only_for_equal_names(a: str, b: str) -> None:
    assert distance(a, b) == distance(b, a)
    assert (distance(a, b) == 0) == (a == b)
    assert abs(len(a) - len(b)) <= distance(a, b) <= max(len(a), len(b))


def test_the_nearest_name_is_found() -> None:
    assert (
        nearest("MAX_QUEU_SIZE", ["PORT", "MAX_QUEUE_SIZE", "MAX_BODY_BYTES"]) == "MAX_QUEUE_SIZE"
    )
