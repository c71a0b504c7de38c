"""Require an access token, and limit the rate of each client.

Both are decided before a body is read. One class does both, because a wrong token costs its address
a place in the rate limit.
"""

import hashlib
import hmac
import math
import os
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from app.context import (
    COUNTERS,
    DEFAULT_NAME,
    RequestContext,
    context_of,
)
from app.error_responses import error_response
from app.errors import RateLimitedError, UnauthorizedError
from app.middleware.rate_limit import TokenBuckets
from smart_embedder import errors
from smart_embedder.errors import StartupError

log = structlog.get_logger(__name__)
# Two writes within one tick of a file system's clock get the same time; the coarsest clock in use
# (FAT) ticks every two seconds.
_CLOCK_TICK_NS = 2_000_000_000

_PUBLIC = ("/health", "/ui", "/docs", "/redoc", "/openapi.json", "/static/docs")
_HOW = "send Authorization: Bearer <token>, with a token of API_TOKEN or API_TOKENS_FILE"


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


class RequireTokenAndLimitRate:
    """Answers 401 without a known token, and 429 to a client that has exceeded its rate limit.

    A request for work counts for its client: the name of its token, or its address.

    A request whose token failed counts for its address, on every path, in two buckets: that of work
    without a named token, and one of failures alone. Once that address has no tries left it is
    answered 429, and from then on a correct token gets another answer than a wrong one only for
    requests that are counted by its name. So guessing locks out no other client.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: ApiTokens,
        buckets: TokenBuckets,
        *,
        requests_per_minute: int,
        burst: int,
        protect_metrics: bool,
    ) -> None:
        self.app = app
        self._tokens = tokens
        self._buckets = buckets
        self._protected = COUNTERS if protect_metrics else ()
        self._allowed = (
            f"{burst} requests at once and {requests_per_minute} a minute are allowed "
            "(RATE_LIMIT_BURST_SIZE, RATE_LIMIT_REQUESTS_PER_MINUTE)"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass, or refuse it before its body is read."""
        if scope["type"] == "http":
            context, wait = context_of(scope), 0.0
            error: errors.SmartEmbedderError | None = None
            failures = f"failures:{context.client_address}"
            is_public = not self._tokens.required or self._is_public(context)
            if not is_public:
                token, fault = _authorization(scope)
                context.token_name = self._tokens.name_of(token)
                if context.token_name is None:
                    error = UnauthorizedError(f"{fault}: {_HOW}")
            if error is not None:
                wait = self._buckets.take(context.client)
                wait = max(wait, self._buckets.take(failures))
            elif context.endpoint is not None:
                wait = self._buckets.take(context.client)
            elif not is_public and (
                context.token_name == DEFAULT_NAME or not _is_below(context.route, COUNTERS)
            ):
                # The answer would only tell a guessing client that the token is correct.
                wait = self._buckets.peek(failures)
            if wait:
                seconds = math.ceil(wait)
                error = RateLimitedError(
                    f"too many requests: {self._allowed}; try again in {seconds} s",
                    retry_after=seconds,
                )
            if error is not None:
                await error_response(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _is_public(self, context: RequestContext) -> bool:
        """Whether the request needs no token; a request for work always needs one."""
        path = context.route
        public = context.is_public or _is_below(path, _PUBLIC)
        return public and context.endpoint is None and not _is_below(path, self._protected)


def _is_below(path: str, parents: Sequence[str]) -> bool:
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)


def _authorization(scope: Scope) -> tuple[bytes, str]:
    """The token that was sent, empty if there is none, and what to say if it is not known.

    It stands after `Bearer`, in upper or lower case, or alone, as some clients send it.
    """
    # Bytes: str.strip would remove more than white space.
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = header.strip().partition(b" ")
    if not scheme:
        return b"", "no token was sent"
    if scheme.lower() != b"bearer":
        return header, "the Authorization header holds no bearer token"
    if not token.strip():
        return b"", "the Authorization header holds no bearer token"
    return token, "the token that was sent is not known"
