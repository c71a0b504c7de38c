"""Tokens: known ones by name, a file that changes, and nothing that gives a token away."""

from pathlib import Path

import pytest

from app.errors import StartupError
from app.tokens import Tokens


def rewrite(file: Path, text: str) -> None:
    """Change a file as an operator's editor does: a new one in its place."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


def test_without_a_token_none_is_required() -> None:
    assert not Tokens(None, None).required
    assert not Tokens("", None).required


def test_a_token_is_known_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# people\nalice:secret-a\n\n bob : secret:b \n")
    tokens = Tokens("own", file)
    assert tokens.name_of(b"own") == "default"
    assert tokens.name_of(b"secret-a") == "alice"
    assert tokens.name_of(b"secret:b") == "bob"
    for wrong in (b"", b"secret", b"secret-a ", b"alice", "sécret".encode()):
        assert tokens.name_of(wrong) is None


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice:one\n")
    tokens = Tokens(None, file)
    rewrite(file, "alice:two\n")
    assert tokens.name_of(b"one") is None
    assert tokens.name_of(b"two") == "alice"


@pytest.mark.parametrize("text", ["alice\n", ":token\n", "alice:\n", "a:1\na:2\n"])
def test_a_change_for_the_worse_leaves_the_tokens_as_they_were(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice:one\n")
    tokens = Tokens(None, file)
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
        Tokens(None, file)
    assert "hidden" not in str(caught.value)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        Tokens(None, tmp_path / "absent")
