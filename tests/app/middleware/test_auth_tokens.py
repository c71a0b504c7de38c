"""Access tokens: their names, and a file that changes."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from app.middleware.auth import ApiTokens
from app.middleware.rate_limit import TokenTerms
from smart_embedder.errors import StartupError


def rewrite(file: Path, text: str) -> None:
    """Replace the file by a new one, as editors do."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with one token."""
    file = tmp_path / "tokens"
    file.write_text("alice:one\n")
    return file


def test_a_token_is_known_by_its_name(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf# people\r\nalice:secret-a\r\n\n bob : secret:b \n")
    tokens = ApiTokens("own", file)
    assert [ApiTokens(token, None).required for token in ("own", "", None)] == [True, False, False]
    for token, name in ((b"own", "default"), (b"secret-a", "alice"), (b"secret:b", "bob")):
        assert tokens.find_name(token) == name
    for wrong in (b"", b"secret", b"secret-a b", b"alice", "sécret".encode()):
        assert tokens.find_name(wrong) is None


@pytest.mark.parametrize(
    "text", ["alice\n", ":token\n", "alice:\n", "a:1\na:2\n", " default :xyz\n"]
)
def test_an_invalid_file_leaves_the_tokens_as_they_were(file: Path, text: str) -> None:
    tokens = ApiTokens("own", file)
    rewrite(file, text)
    for token, name in ((b"own", "default"), (b"one", "alice"), (b"xyz", None)):
        assert tokens.find_name(token) == name
    file.unlink()
    assert tokens.find_name(b"one") == "alice"
    rewrite(file, "alice:three\n")
    assert tokens.find_name(b"three") == "alice"


@pytest.mark.parametrize(
    ("api_token", "content", "message"),
    [
        (None, b"hidden-token\n", r"line 1 is not name:token"),
        (None, b"a:1\nhidden-token\n", r"line 2 is not name:token"),
        (None, b"alice:\xff\n", "is not UTF-8 text"),
        (None, None, "cannot be read"),
        ("own", b" default :xyz\n", "line 1 has the name default, which is reserved for API_TOKEN"),
        (" \n", b"", "API_TOKEN holds only white space"),
    ],
)
def test_an_invalid_file_or_token_stops_the_start_and_is_not_quoted(
    file: Path, api_token: str | None, content: bytes | None, message: str
) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(StartupError, match=message) as caught:
        ApiTokens(api_token, file)
    assert "hidden" not in str(caught.value)


WHITE = st.text(" \t\r\n", max_size=3)
TOKEN = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1).filter(
    lambda text: text == text.strip() and text.encode() == text.encode().strip()
)


@given(TOKEN, WHITE, WHITE, WHITE)
@settings(max_examples=40)
def test_white_space_around_a_token_is_ignored(
    tmp_path_factory, token: str, before: str, after: str, sent: str
) -> None:
    """In the file and in a request; every other byte counts."""
    presented = f"{sent}{token}{sent}".encode()
    assert ApiTokens(f"{before}{token}{after}", None).find_name(presented) == "default"
    file = tmp_path_factory.mktemp("white") / "tokens"
    file.write_text(f"alice:{token}{after}\n", encoding="utf-8", newline="")
    assert ApiTokens(None, file).find_name(presented) == "alice"


def test_a_change_while_the_file_is_being_read_is_not_missed(file: Path, monkeypatch) -> None:
    """The version is read before the content, so that the next call reads the file again."""
    file.write_text("alice:one\nbob:two\n")
    real = os.fstat

    def fstat_before_a_write(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        monkeypatch.setattr(os, "fstat", real)
        rewrite(file, "alice:one\n")
        return status

    monkeypatch.setattr(os, "fstat", fstat_before_a_write)
    tokens = ApiTokens(None, file)
    assert tokens.find_name(b"two") is None


def test_a_change_within_one_tick_of_the_clock_is_not_missed(file: Path) -> None:
    """The new token has the same length, and the file the same time and inode."""
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    tokens = ApiTokens(None, file)
    file.write_text("alice:two\n")
    os.utime(file, ns=times)
    assert tokens.find_name(b"two") == "alice"


def test_a_missing_file_is_logged_once_until_it_is_back(file: Path) -> None:
    tokens = ApiTokens(None, file)
    for _ in range(2):
        away = file.rename(file.with_name("away"))
        with capture_logs() as logs:
            assert [tokens.find_name(b"one") for _ in range(5)] == ["alice"] * 5
        (line,) = logs
        assert line["event"] == "tokens_file_unreadable"
        assert line["effect"] == "the tokens read last stay valid"
        away.rename(file)
        with capture_logs() as logs:
            assert tokens.find_name(b"one") == "alice"
        assert not logs


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such mode")
@pytest.mark.parametrize(
    ("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)]
)
def test_a_file_that_every_user_can_open_is_a_warning(file: Path, mode: int, warned: bool) -> None:
    file.chmod(mode)
    with capture_logs() as logs:
        ApiTokens(None, file)
    line = {
        "event": "tokens_file_open_to_others",
        "file": str(file),
        "mode": f"0{mode:o}",
        "advice": f"chmod 600 {file}",
        "log_level": "warning",
    }
    assert logs == ([line] if warned else [])


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root gives files away")
def test_the_advice_for_a_file_of_another_user_keeps_it_readable_for_the_service(
    file: Path, monkeypatch
) -> None:
    os.chown(file, 1234, -1)
    file.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with capture_logs() as logs:
        ApiTokens(None, file)
    assert [line["advice"] for line in logs] == [f"chown 1000 {file} && chmod 600 {file}"]


LIMITED = """\
# The tokens of today keep their meaning: these have a colon, spaces and an equals sign.
bob:with: spaces = weight=2
alice:one
  requests_per_minute=600 tokens_per_minute=100000
  weight=3

carol:two
"""


def test_the_lines_below_a_token_have_its_limits(file: Path) -> None:
    rewrite(file, LIMITED)
    tokens = ApiTokens("own", file)
    assert tokens.names == ["default", "bob", "alice", "carol"]
    assert tokens.find_name(b"with: spaces = weight=2") == "bob"
    assert [tokens.limits_of(name) for name in ("default", "bob", "carol", None)] == [None] * 4
    limits = tokens.limits_of("alice")
    assert limits is not None
    assert limits.terms == TokenTerms(requests_per_minute=600, tokens_per_minute=100000, weight=3)


def test_what_a_token_has_used_stays_counted_when_the_file_changes(file: Path) -> None:
    rewrite(file, "alice:one\nrequests_per_minute=1\n")
    tokens = ApiTokens(None, file)

    def refused() -> bool:
        assert tokens.find_name(b"one") == "alice"
        limits = tokens.limits_of("alice")
        assert limits is not None
        return limits.accept_request() is not None

    assert not refused()
    rewrite(file, "bob:two\nalice:one\nrequests_per_minute=1\n")
    assert refused()
    rewrite(file, "alice:one\nrequests_per_minute=2\n")
    assert not refused()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("weight=2\nalice:one\n", "line 1 has limits, but there is no token above it"),
        ("alice:one\nweight=0\n", "line 2 has weight=0: weight is 1 to 100"),
        ("alice:one\nweight=101\n", "line 2 has weight=101: weight is 1 to 100"),
        ("alice:one\ntokens_per_minute=0\n", "tokens_per_minute is 1 or more"),
        ("alice:one\nrequests=5\n", "line 2 is not name:token, and no limits of the token above"),
        ("alice:one\nrequests_per_minute=1.5\n", "line 2 is not name:token"),
        ("alice:one\nweight = 2\n", "line 2 is not name:token"),
        ("alice:one\ntokens_per_minute: 600\n", "line 2 begins with the name of a limit and has"),
        ("alice:one\nweight=2 # bulk: half\n", "line 2 begins with the name of a limit and has a"),
        ("alice:one\nweight=2\nweight=3\n", "line 3 has weight=3, and weight is set already for"),
    ],
)
def test_limits_that_cannot_be_read_stop_the_start(file: Path, content: str, message: str) -> None:
    rewrite(file, content)
    with pytest.raises(StartupError, match=message):
        ApiTokens(None, file)
