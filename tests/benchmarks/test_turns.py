"""The order in which engines take turns."""

from benchmarks.turns import turns


def test_engines_alternate_and_leave_when_their_rounds_are_over() -> None:
    order = [name for _, name in turns({"a": 3, "b": 1, "c": 2})]
    assert order == ["a", "b", "c", "a", "c", "a"]


def test_the_number_of_the_round_comes_with_the_name() -> None:
    assert list(turns({"a": 2, "b": 2})) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]


def test_without_engines_there_are_no_turns() -> None:
    assert list(turns({})) == []
