"""Require an access token, and limit the rate of each client.

Both are checked before the body is read. One class does both, because a wrong token also counts
against the rate limit of its address.
"""

import hashlib
import hmac
import math
import os
import re
import stat
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.context import DEFAULT_NAME, METRICS_PATHS, RequestContext, context_of
from app.error_responses import error_response
from app.errors import RateLimitedError, UnauthorizedError
from app.middleware.rate_limit import TokenBuckets, TokenLimits, TokenTerms
from smart_embedder.errors import SmartEmbedderError, StartupError

log = structlog.get_logger(__name__)
# Two writes within one tick of a file system's clock get the same time; the coarsest clock in use
# (FAT) ticks every two seconds.
_CLOCK_TICK_NS = 2_000_000_000

# A line below a token: its limits and its weight. Without a colon it is no token.
_TERM = re.compile(r"(requests_per_minute|tokens_per_minute|weight)=([0-9]{1,12})")
_TERM_NAME = re.compile(r"(requests_per_minute|tokens_per_minute|weight)\b")
_MAX_WEIGHT = 100

_PUBLIC = ("/health", "/ui", "/docs", "/redoc", "/openapi.json", "/static/docs")
_ADVICE = "send Authorization: Bearer <token>, with a token of API_TOKEN or API_TOKENS_FILE"


def _hash_token(token: bytes) -> bytes:
    """Hash a token without surrounding white space; only digests are stored and compared.

    All digests have the same length, so the time of a comparison does not reveal a token's length.
    """
    return hashlib.sha256(token.strip()).digest()


def _version_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return facts that change with the file, except on a second write within one clock tick."""
    return status.st_mtime_ns, status.st_size, status.st_ino


class ApiTokens:
    """The valid tokens, their names and their limits.

    Each call reads the file again if it has changed. If the file cannot be read, the tokens read
    last stay valid and one warning is logged. Tokens are never logged. Thread-safe.
    """

    def __init__(self, token: str | None, file: Path | None) -> None:
        if token and not token.strip():
            raise StartupError("API_TOKEN holds only white space: set a token, or leave it out")
        self._default_token = {DEFAULT_NAME: _hash_token(token.encode())} if token else {}
        self._file = file
        self._version: tuple[int, int, int] | None = None
        self._named: dict[str, bytes] = {}
        self._limits: dict[str, TokenLimits] = {}
        self._last_warning: str | None = None
        self._lock = threading.Lock()
        self.required = bool(self._default_token) or file is not None
        if file is not None:
            _warn_if_others_can_open(file, self._read(file))

    @property
    def is_unreadable(self) -> bool:
        """Whether the file cannot be read, so that the tokens read last are in use."""
        self._refresh()
        return self._last_warning is not None

    @property
    def names(self) -> list[str]:
        """The names of all tokens."""
        return [*self._default_token, *self._named]

    def limits_of(self, name: str | None) -> TokenLimits | None:
        """Return the limits of a named token, None if the file sets none for it."""
        return self._limits.get(name) if name is not None else None

    def find_name(self, presented: bytes) -> str | None:
        """Return the name of a token, or None if it is unknown; compares in constant time."""
        self._refresh()
        found, digest = None, _hash_token(presented)
        for name, known_digest in (self._default_token | self._named).items():
            if hmac.compare_digest(known_digest, digest):
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
                self._version = None  # Once the file is back, read it even if it is unchanged.
                self._warn_once(f"API_TOKENS_FILE={self._file} cannot be read: {error.strerror}")
            except StartupError as error:
                self._warn_once(str(error))

    def _read(self, file: Path) -> os.stat_result:
        """Read the tokens; raise `StartupError` if the file cannot be read or parsed."""
        try:
            with file.open("rb") as opened:
                # Before the content, so that a write in between is seen as a change.
                status = os.fstat(opened.fileno())
                version = _version_of(status)
                text = opened.read().decode("utf-8-sig")
        except OSError as error:
            raise StartupError(
                f"API_TOKENS_FILE={file} cannot be read: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            self._version = version
            raise StartupError(f"API_TOKENS_FILE={file} is not UTF-8 text") from error
        self._version = version
        self._named, terms = _parse_tokens(text, file)
        # What a token has used stays counted while its limits are the same.
        self._limits = {
            name: known
            if (known := self._limits.get(name)) is not None and known.terms == its_terms
            else TokenLimits(name, its_terms)
            for name, its_terms in terms.items()
        }
        self._last_warning = None
        return status

    def _warn_once(self, reason: str) -> None:
        """Log a new reason once, not at every request."""
        if reason != self._last_warning:
            self._last_warning = reason
            log.warning(
                "tokens_file_unreadable", reason=reason, effect="the tokens read last stay valid"
            )


def _warn_if_others_can_open(file: Path, status: os.stat_result) -> None:
    """Warn if every user of the machine can read or write the file; Windows has no such mode."""
    if os.name != "posix" or not status.st_mode & (stat.S_IROTH | stat.S_IWOTH):
        return
    advice = f"chmod 600 {file}"
    if os.geteuid() not in {0, status.st_uid}:  # chmod alone would lock the service out.
        advice = f"chown {os.geteuid()} {file} && {advice}"
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    log.warning("tokens_file_open_to_others", file=str(file), mode=mode, advice=advice)


def _parse_tokens(text: str, file: Path) -> tuple[dict[str, bytes], dict[str, TokenTerms]]:
    """Parse lines of `name:token` to digests by name, and the lines below them to their terms.

    Skips blank lines and comments (#).
    """
    named: dict[str, bytes] = {}
    terms: dict[str, TokenTerms] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, token = line.partition(":")
        name = name.strip()
        if not colon:
            place = f"API_TOKENS_FILE={file}: line {number}"
            last = next(reversed(named), "")
            terms[last] = _parse_terms(line, terms.get(last, TokenTerms()), place)
            if not named:
                raise StartupError(f"{place} has limits, but there is no token above it")
            continue
        if not (name and token.strip()) or name in named:
            raise StartupError(
                f"API_TOKENS_FILE={file}: line {number} is not name:token with a unique name"
            )
        if _TERM_NAME.match(name):  # Otherwise its number would be a token, easy to guess.
            raise StartupError(
                f"API_TOKENS_FILE={file}: line {number} begins with the name of a limit and has a "
                "colon: write limits as in requests_per_minute=600, and give tokens other names"
            )
        if name == DEFAULT_NAME:
            raise StartupError(
                f"API_TOKENS_FILE={file}: line {number} has the name {DEFAULT_NAME}, which is "
                "reserved for API_TOKEN: choose another name"
            )
        named[name] = _hash_token(token.encode())
    return named, terms


def _parse_terms(line: str, terms: TokenTerms, place: str) -> TokenTerms:
    """Add the terms of a line, such as `requests_per_minute=600 weight=2`, to `terms`."""
    for word in line.split():
        found = _TERM.fullmatch(word)
        if found is None:
            raise StartupError(
                f"{place} is not name:token, and no limits of the token above it, such as "
                f"requests_per_minute=600 tokens_per_minute=100000 weight=2"
            )
        name, value = found[1], int(found[2])
        if not value or (name == "weight" and value > _MAX_WEIGHT):
            allowed = f"1 to {_MAX_WEIGHT}" if name == "weight" else "1 or more"
            raise StartupError(f"{place} has {word}: {name} is {allowed}")
        if getattr(terms, name) not in {getattr(TokenTerms(), name), value}:
            raise StartupError(f"{place} has {word}, and {name} is set already for its token")
        terms = replace(terms, **{name: value})
    return terms


class RequireTokenAndLimitRate:
    """Answers 401 without a known token, and 429 to a client that has exceeded its rate limit.

    A request for work counts against its client: the name of its token, or its address. A named
    token with limits in API_TOKENS_FILE has buckets of its own, which its responses show.

    A request with a missing or wrong token counts, on every path, against two buckets of its
    address: the one for ordinary requests, and one for failures only. Once one is empty, the
    address gets 429 even with a valid token, so that tokens cannot be guessed. Exceptions: requests
    with a named token for work, /stats or /metrics, so that guessing locks out no other client.
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
        self._protected = METRICS_PATHS if protect_metrics else ()
        self._allowed = (
            f"{burst} requests at once and {requests_per_minute} a minute are allowed "
            "(RATE_LIMIT_BURST_SIZE, RATE_LIMIT_REQUESTS_PER_MINUTE)"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it before its body is read."""
        if scope["type"] == "http":
            context = context_of(scope)
            is_public = not self._tokens.required or self._is_public(context)
            error = None if is_public else self._identify(context, scope)
            limits = self._tokens.limits_of(context.token_name)
            error = self._limit_rate(context, limits, error, is_public=is_public) or error
            if limits is not None:
                context.client_weight, context.charge = limits.terms.weight, limits.charge
                send = _add_headers(send, limits)
            if error is not None:
                await error_response(scope, error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _identify(self, context: RequestContext, scope: Scope) -> SmartEmbedderError | None:
        """Find the name of the request's token; return an error if it is unknown."""
        token, fault = _read_token(scope)
        context.token_name = self._tokens.find_name(token)
        if context.token_name is None:
            return UnauthorizedError(f"{fault}: {_ADVICE}")
        return None

    def _limit_rate(
        self,
        context: RequestContext,
        limits: TokenLimits | None,
        fault: SmartEmbedderError | None,
        *,
        is_public: bool,
    ) -> RateLimitedError | None:
        """Count the request; return the error if its client has exceeded a limit.

        `limits` and `fault` are the limits and the error of its token.
        """
        wait = 0.0
        failures = f"failures:{context.client_address}"
        if fault is not None:
            wait = self._buckets.take(context.client)
            wait = max(wait, self._buckets.take(failures))
        elif context.endpoint is not None:
            if limits is not None and (error := limits.accept_request()) is not None:
                return error
            if limits is None or not limits.limits_requests:
                wait = self._buckets.take(context.client)
        elif not is_public and (
            context.token_name == DEFAULT_NAME or not _is_below(context.route, METRICS_PATHS)
        ):
            # Another answer would tell a guessing client that the token is correct.
            wait = self._buckets.peek(failures)
        if not wait:
            return None
        seconds = math.ceil(wait)
        return RateLimitedError(
            f"too many requests: {self._allowed}; try again in {seconds} s", retry_after=seconds
        )

    def _is_public(self, context: RequestContext) -> bool:
        """Whether the request needs no token; a request for work always needs one."""
        path = context.route
        public = context.is_public or _is_below(path, _PUBLIC)
        return public and context.endpoint is None and not _is_below(path, self._protected)


def _add_headers(send: Send, limits: TokenLimits) -> Send:
    """Return `send` that adds the headers RateLimit-Policy and RateLimit to the response."""

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *limits.headers()]}
        await send(message)

    return send_with_limits


def _is_below(path: str, parents: Sequence[str]) -> bool:
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)


def _read_token(scope: Scope) -> tuple[bytes, str]:
    """Return the token that was sent, or an empty one, and the error in case it is unknown.

    The token follows `Bearer`, in any case; some clients send it alone. Azure's clients send it as
    `api-key`, which is read if there is no Authorization.
    """
    headers = dict(reversed(scope["headers"]))  # Of several, the first counts.
    # As bytes, because str.strip removes more than HTTP's white space.
    header = headers.get(b"authorization", b"")
    scheme, _, token = header.strip().partition(b" ")
    if not scheme:
        token = headers.get(b"api-key", b"")
        return token, "the token is unknown" if token.strip() else "no token was sent"
    if scheme.lower() != b"bearer":
        return header, "the Authorization header holds no bearer token"
    if not token.strip():
        return b"", "the Authorization header holds no bearer token"
    return token, "the token is unknown"
