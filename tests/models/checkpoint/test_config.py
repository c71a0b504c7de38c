"""Values of a model's `config.json`: used as they are, or refused by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smart_embedder.errors import StartupError
from smart_embedder.models.checkpoint.config import number, read_config, read_optional, whole_number

ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 3), st.floats(), st.text(),
    st.sampled_from([2**31 - 1, 2**31, 2**31 + 1, 2.0**31, 2.0**31 + 1, 0.0]),
)  # fmt: skip


@given(ANYTHING, st.integers(0, 2))
def test_a_whole_number_is_one_within_its_range(tmp_path_factory, value, least) -> None:
    if type(value) is int and least <= value <= 2**31:
        assert whole_number("m", {"a": value}, "a", least=least) == value
    else:
        with pytest.raises(StartupError, match="no usable a: "):
            whole_number(tmp_path_factory.getbasetemp(), {"a": value}, "a", least=least)


@given(ANYTHING)
def test_a_number_is_finite_and_above_zero(tmp_path_factory, value) -> None:
    if type(value) in {int, float} and 0 < value <= 2**31:
        found = number("m", {"a": value}, "a", 1.0)
        assert (type(found), found) == (float, value)
    else:
        with pytest.raises(StartupError, match="no usable a: "):
            number(tmp_path_factory.getbasetemp(), {"a": value}, "a", 1.0)


def test_what_is_missing_has_its_default_or_is_refused(tmp_path) -> None:
    assert whole_number(tmp_path, {}, "a", 7) == 7
    assert number(tmp_path, {}, "a", 7) == 7.0
    assert whole_number(tmp_path, {"a": 1}, "a") == 1
    for least in (0, 2):
        with pytest.raises(StartupError, match="no usable a: None"):
            whole_number(tmp_path, {}, "a", least=least)
    with pytest.raises(StartupError, match="no usable a: 0"):
        whole_number(tmp_path, {"a": 0}, "a")


@pytest.mark.parametrize(
    ("content", "message"),
    [("[1]", "is not a JSON object"), ("{", "cannot be read"), ("[" * 200_000, "cannot be read")],
)
def test_a_file_that_holds_no_object_is_named(tmp_path, content, message) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=f"config.json {message}"):
        read_config(tmp_path)
    with pytest.raises(StartupError, match=message):
        read_optional(tmp_path / "config.json")


def test_only_an_optional_file_may_be_missing(tmp_path) -> None:
    assert read_optional(tmp_path / "config.json") == {}
    with pytest.raises(StartupError, match="is not a model: it holds no config.json"):
        read_config(tmp_path)
