"""Access tokens: one from the settings, and named ones from a file that may change at any time."""

import hmac
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.errors import StartupError

log = structlog.get_logger(__name__)

DEFAULT_NAME = "default"


@dataclass(frozen=True, slots=True)
class _Version:
    """What tells one state of a file from the next."""

    modified_ns: int
    size: int
    inode: int


class Tokens:
    """Which tokens open the service, and whose they are.

    The file is looked at again at every question and read again when it has changed; a change that
    cannot be read is logged and leaves the tokens as they were. No token is ever logged.
    """

    def __init__(self, token: str | None, file: Path | None) -> None:
        self._own = {} if not token else {DEFAULT_NAME: token.encode()}
        self._file = file
        self._version: _Version | None = None
        self._named: dict[str, bytes] = {}
        if file is not None:
            self._named = _read(file)
            self._version = _version_of(file)

    @property
    def required(self) -> bool:
        """Whether a token is asked for at all."""
        return bool(self._own) or self._file is not None

    def name_of(self, presented: bytes) -> str | None:
        """Whose token this is, or None; takes the same time whichever it is."""
        self._refresh()
        found = None
        for name, token in (self._own | self._named).items():
            if hmac.compare_digest(token, presented):
                found = name
        return found

    def _refresh(self) -> None:
        if self._file is None:
            return
        try:
            version = _version_of(self._file)
            if version == self._version:
                return
            self._version = version
            self._named = _read(self._file)
        except (OSError, StartupError) as error:
            log.warning("tokens_file_unreadable", reason=str(error))


def _version_of(file: Path) -> _Version:
    status = file.stat()
    return _Version(status.st_mtime_ns, status.st_size, status.st_ino)


def _read(file: Path) -> dict[str, bytes]:
    """`name:token` lines; blank ones and those that begin with # do not count."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"API_TOKENS_FILE={file} cannot be read: {error}") from error
    named: dict[str, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, separator, token = (part.strip() for part in line.partition(":"))
        if not (name and separator and token) or name in named:
            raise StartupError(
                f"API_TOKENS_FILE={file}: line {number} is not name:token with a name of its own"
            )
        named[name] = token.encode()
    return named
