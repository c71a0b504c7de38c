"""Access tokens: one from the settings, and named ones from a file that may change at any time."""

import hashlib
import hmac
import os
import time
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.errors import StartupError

log = structlog.get_logger(__name__)

DEFAULT_NAME = "default"
# Two writes within one tick of a file system's clock leave the same time behind; the coarsest clock
# in use ticks every two seconds.
_CLOCK_TICK_NS = 2_000_000_000


def _digest(token: bytes) -> bytes:
    """What is kept and compared in place of a token; white space around it does not count.

    Digests all have one length, so that a comparison does not tell a token's length either.
    """
    return hashlib.sha256(token.strip()).digest()


@dataclass(frozen=True, slots=True)
class _Version:
    """What tells one state of a file from the next."""

    modified_ns: int
    size: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "_Version":
        return cls(status.st_mtime_ns, status.st_size, status.st_ino)

    @property
    def is_certain(self) -> bool:
        """Whether a later write cannot leave the same version."""
        return time.time_ns() - self.modified_ns > _CLOCK_TICK_NS


class Tokens:
    """Which tokens open the service, and whose they are.

    The file is looked at again at every question and read again when it has changed. A change that
    cannot be read leaves the tokens as they were, and is logged once; so does a missing file. No
    token is ever logged.
    """

    def __init__(self, token: str | None, file: Path | None) -> None:
        if token and not token.strip():
            raise StartupError("API_TOKEN holds nothing but white space: set a token, or leave it")
        self._own = {DEFAULT_NAME: _digest(token.encode())} if token else {}
        self._file = file
        self._version: _Version | None = None
        self._named: dict[str, bytes] = {}
        self._complaint: str | None = None
        if file is not None:
            self._read(file)

    @property
    def required(self) -> bool:
        """Whether a token is asked for at all."""
        return bool(self._own) or self._file is not None

    def name_of(self, presented: bytes) -> str | None:
        """Whose token this is, or None; takes the same time whichever it is."""
        self._refresh()
        found, wanted = None, _digest(presented)
        for name, token in (self._own | self._named).items():
            if hmac.compare_digest(token, wanted):
                found = name
        return found

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            version = _Version.of(self._file.stat())
            if version != self._version or not version.is_certain:
                self._read(self._file)
        except OSError as error:
            self._version = None  # Read again once it is back, whatever it is then.
            self._complain(f"API_TOKENS_FILE={self._file} cannot be read: {error.strerror}")
        except StartupError as error:
            self._complain(str(error))

    def _read(self, file: Path) -> None:
        """Take over what the file says; raise `StartupError` where it cannot be understood."""
        try:
            with file.open("rb") as opened:
                # Before the content: what is written after this is seen as a change.
                version = _Version.of(os.fstat(opened.fileno()))
                text = opened.read().decode("utf-8-sig")
        except OSError as error:
            raise StartupError(
                f"API_TOKENS_FILE={file} cannot be read: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            self._version = version
            raise StartupError(f"API_TOKENS_FILE={file} is no UTF-8 text") from error
        self._version = version
        self._named = _parse(text, file)
        self._complaint = None

    def _complain(self, reason: str) -> None:
        """Once for each thing that is wrong, and not for each request."""
        if reason != self._complaint:
            self._complaint = reason
            log.warning(
                "tokens_file_unreadable", reason=reason, effect="the tokens read last stay valid"
            )


def _parse(text: str, file: Path) -> dict[str, bytes]:
    """`name:token` lines; blank ones and those that begin with # do not count."""
    named: dict[str, bytes] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, token = line.partition(":")
        name = name.strip()
        if not (name and token.strip()) or name in named:
            raise StartupError(
                f"API_TOKENS_FILE={file}: line {number} is not name:token with a name of its own"
            )
        if name == DEFAULT_NAME:
            raise StartupError(
                f"API_TOKENS_FILE={file}: line {number} takes the name {DEFAULT_NAME}, which is "
                "API_TOKEN's: choose another one"
            )
        named[name] = _digest(token.encode())
    return named
