"""Access tokens: one from the settings, and named ones from a file that may change at any time."""

import hashlib
import hmac
import os
import stat
import threading
import time
from pathlib import Path

import structlog

from smart_embedder.errors import StartupError

log = structlog.get_logger(__name__)

DEFAULT_NAME = "default"
# Of API_TOKENS_FILE: whose token may load and unload models, as API_TOKEN may.
OPERATOR_NAME = "operator"
# Two writes within one tick of a file system's clock get the same time; the coarsest clock in use
# (FAT) ticks every two seconds.
_CLOCK_TICK_NS = 2_000_000_000


def _digest(token: bytes) -> bytes:
    """The digest of a token without white space around it; only digests are stored and compared.

    All digests have the same length, so that the time of a comparison does not reveal a token's.
    """
    return hashlib.sha256(token.strip()).digest()


def _version_of(status: os.stat_result) -> tuple[int, int, int]:
    """What changes where the file does, but for a write within the tick of another."""
    return status.st_mtime_ns, status.st_size, status.st_ino


class ApiTokens:
    """The valid tokens and their names.

    Each call reads the file again if it has changed. If it cannot be read, the tokens stay as they
    were, and one warning is logged. No token is ever logged. Several threads may call.
    """

    def __init__(self, token: str | None, file: Path | None) -> None:
        if token and not token.strip():
            raise StartupError("API_TOKEN holds nothing but white space: set a token, or leave it")
        self._own = {DEFAULT_NAME: _digest(token.encode())} if token else {}
        self._file = file
        self._version: tuple[int, int, int] | None = None
        self._named: dict[str, bytes] = {}
        self._last_warning: str | None = None
        self._lock = threading.Lock()
        # Whether a token is asked for at all.
        self.required = bool(self._own) or file is not None
        if file is not None:
            _warn_if_others_can_open(file, self._read(file))

    @property
    def unreadable(self) -> bool:
        """Whether the tokens that were read last are used in place of those of the file."""
        self._refresh()
        return self._last_warning is not None

    def name_of(self, presented: bytes) -> str | None:
        """The name of this token, or None; compares in constant time."""
        self._refresh()
        found, digest = None, _digest(presented)
        for name, token in (self._own | self._named).items():
            if hmac.compare_digest(token, digest):
                found = name
        return found

    def _refresh(self) -> None:
        if self._file is None:
            return
        with self._lock:
            try:
                status = self._file.stat()
                is_recent = time.time_ns() - status.st_mtime_ns <= _CLOCK_TICK_NS
                if is_recent or _version_of(status) != self._version:
                    self._read(self._file)
            except OSError as error:
                self._version = None  # Read it again once it is back, even if it is unchanged.
                self._warn_once(f"API_TOKENS_FILE={self._file} cannot be read: {error.strerror}")
            except StartupError as error:
                self._warn_once(str(error))

    def _read(self, file: Path) -> os.stat_result:
        """Read the tokens; raise `StartupError` where the file cannot be read or parsed."""
        try:
            with file.open("rb") as opened:
                # Before the content: a later write is then seen as a change.
                status = os.fstat(opened.fileno())
                version = _version_of(status)
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
        self._last_warning = None
        return status

    def _warn_once(self, reason: str) -> None:
        """Log a reason once, and not for each request."""
        if reason != self._last_warning:
            self._last_warning = reason
            log.warning(
                "tokens_file_unreadable", reason=reason, effect="the tokens read last stay valid"
            )


def _warn_if_others_can_open(file: Path, status: os.stat_result) -> None:
    """Warn of a file that every user of the machine can read or write; Windows has no such mode."""
    if os.name != "posix" or not status.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        return
    advice = f"chmod 600 {file}"
    if os.geteuid() not in {0, status.st_uid}:  # Else the service could not read it any longer.
        advice = f"chown {os.geteuid()} {file} && {advice}"
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    log.warning("tokens_file_open_to_others", file=str(file), mode=mode, advice=advice)


def _parse(text: str, file: Path) -> dict[str, bytes]:
    """Parse `name:token` lines; blank ones and those that begin with # are skipped."""
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
