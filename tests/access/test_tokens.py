"""Access tokens: their names, a file that changes, and nothing that reveals a token."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from smart_embedder.access.tokens import ApiTokens
from smart_embedder.errors import StartupError


def rewrite(file: Path, text: str) -> None:
    """Replace a file by a new one, as editors do."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


def test_without_a_token_none_is_required() -> None:
    assert not ApiTokens(None, None).required
    assert not ApiTokens("", None).required


def test_a_token_is_known_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# people\nalice:secret-a\n\n bob : secret:b \n")
    tokens = ApiTokens("own", file)
    assert tokens.name_of(b"own") == "default"
    assert tokens.name_of(b"secret-a") == "alice"
    assert tokens.name_of(b"secret:b") == "bob"
    for wrong in (b"", b"secret", b"secret-a b", b"alice", "sécret".encode()):
        assert tokens.name_of(wrong) is None


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice:one\n")
    tokens = ApiTokens(None, file)
    rewrite(file, "alice:two\n")
    assert tokens.name_of(b"one") is None
    assert tokens.name_of(b"two") == "alice"


@pytest.mark.parametrize("text", ["alice\n", ":token\n", "alice:\n", "a:1\na:2\n"])
def test_a_change_for_the_worse_leaves_the_tokens_as_they_were(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice:one\n")
    tokens = ApiTokens(None, file)
    rewrite(file, text)
    assert tokens.name_of(b"one") == "alice"
    file.unlink()
    assert tokens.name_of(b"one") == "alice"
    rewrite(file, "alice:three\n")
    assert tokens.name_of(b"three") == "alice"


@pytest.mark.parametrize("text", ["hidden-token\n", "a:1\nhidden-token\n"])
def test_a_bad_file_stops_the_start_without_quoting_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(StartupError, match=r"line \d is not name:token") as caught:
        ApiTokens(None, file)
    assert "hidden" not in str(caught.value)


def test_a_file_that_is_no_text_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"alice:\xff\n")
    with pytest.raises(StartupError, match="is no UTF-8 text"):
        ApiTokens(None, tmp_path / "tokens")


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        ApiTokens(None, tmp_path / "absent")


@pytest.mark.parametrize("name", ["default", " default "])
def test_a_named_token_cannot_take_the_place_of_api_token(tmp_path: Path, name: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{name}:xyz\n")
    with pytest.raises(StartupError, match="line 1 takes the name default, which is API_TOKEN's"):
        ApiTokens("own", file)
    file.write_text("alice:one\n")
    tokens = ApiTokens("own", file)
    rewrite(file, f"{name}:xyz\nalice:two\n")
    assert tokens.name_of(b"own") == "default"
    assert tokens.name_of(b"xyz") is None
    assert tokens.name_of(b"one") == "alice"


WHITE = st.text(" \t\r\n", max_size=3)
TOKEN = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1).filter(
    lambda text: text == text.strip() and text.encode() == text.encode().strip()
)


@given(TOKEN, WHITE, WHITE, WHITE)
def test_white_space_around_a_token_counts_nowhere(
    tmp_path_factory, token: str, before: str, after: str, sent: str
) -> None:
    """In the file or in a request; every other byte counts."""
    presented = f"{sent}{token}{sent}".encode()
    assert ApiTokens(f"{before}{token}{after}", None).name_of(presented) == "default"
    file = tmp_path_factory.mktemp("white") / "tokens"
    file.write_text(f"alice:{token}{after}\n", encoding="utf-8", newline="")
    assert ApiTokens(None, file).name_of(presented) == "alice"


def test_a_token_of_white_space_stops_the_start() -> None:
    with pytest.raises(StartupError, match="API_TOKEN holds nothing but white space"):
        ApiTokens(" \n", None)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(b"\xef\xbb\xbfalice:one\r\nbob:two\r\n")
    tokens = ApiTokens(None, tmp_path / "tokens")
    assert (tokens.name_of(b"one"), tokens.name_of(b"two")) == ("alice", "bob")


def test_a_change_while_the_file_is_being_read_is_not_missed(tmp_path: Path, monkeypatch) -> None:
    """The version is taken before the content: a later write is read next time."""
    file = tmp_path / "tokens"
    file.write_text("alice:one\nbob:two\n")
    real = os.fstat

    def fstat_before_a_write(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        monkeypatch.setattr(os, "fstat", real)
        rewrite(file, "alice:one\n")
        return status

    monkeypatch.setattr(os, "fstat", fstat_before_a_write)
    tokens = ApiTokens(None, file)
    assert tokens.name_of(b"two") is None


def test_a_change_within_one_tick_of_the_clock_is_not_missed(tmp_path: Path) -> None:
    """A new token of the same length, at the same time, in the same file."""
    file = tmp_path / "tokens"
    file.write_text("alice:one\n")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    tokens = ApiTokens(None, file)
    file.write_text("alice:two\n")
    os.utime(file, ns=times)
    assert tokens.name_of(b"two") == "alice"


def test_a_missing_file_is_told_of_once_until_it_is_back(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice:one\n")
    tokens = ApiTokens(None, file)
    for _ in range(2):
        away = file.rename(tmp_path / "away")
        with capture_logs() as logs:
            assert [tokens.name_of(b"one") for _ in range(5)] == ["alice"] * 5
        (line,) = logs
        assert line["event"] == "tokens_file_unreadable"
        assert line["effect"] == "the tokens read last stay valid"
        away.rename(file)
        with capture_logs() as logs:
            assert tokens.name_of(b"one") == "alice"
        assert not logs
