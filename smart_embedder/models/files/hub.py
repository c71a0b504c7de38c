"""Finds a model in the hub's cache, or downloads it from the hub.

Every failure becomes a `StartupError` that says in one sentence what to do.
"""

import hashlib
import logging
import string
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2
import structlog
from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    get_session,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

from smart_embedder.errors import StartupError
from smart_embedder.interface import Download, DownloadStatus, human_size
from smart_embedder.models.files.reading import AT_ONCE

log = structlog.get_logger(__name__)

# The progress bars of the hub's library for bytes from the network and bytes on the disk. For files
# that the hub stores in chunks, the disk lags behind, and chunks on the disk are not sent.
_BYTE_BARS = {"huggingface_hub.snapshot_download.transfer", "huggingface_hub.snapshot_download"}
_SECONDS_BETWEEN_LINES = 5.0
# The age at which an incomplete file belongs to no running download.
_LEFTOVER_SECONDS = 3600.0
_HUB_TIMEOUT = 10.0
_RETRY_SECONDS = 1.0
_GIT_DIGEST_BYTES = 20
_INCLUDED_FILES = ["*.json", "*.safetensors", "*.bin", "*.pt", "*.jinja"]
_EXCLUDED_FOLDERS = ["onnx/*", "openvino/*", "imgs/*"]


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How a model is fetched; `offline` allows no network, `status` shows a running download."""

    cache: Path
    revision: str | None
    offline: bool
    status: DownloadStatus = field(default_factory=DownloadStatus)


def find_or_download(name: str, hub: HubOptions) -> Path:
    """Return the folder of the model with the hub id `name`; download it if it is not on disk."""
    # The library would log every retry.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    warnings.filterwarnings("ignore", module="huggingface_hub")
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise StartupError(f"the model folder {name} does not exist")
    try:
        return _fetch_snapshot(name, hub)
    except LocalEntryNotFoundError as error:
        raise _missing_model_error(
            name, hub, None if hub.offline else error.__cause__ or error
        ) from error
    except GatedRepoError as error:
        raise StartupError(
            f"the model {name} is gated: accept its terms on the hub, and set HF_TOKEN to a token "
            "of the account that did"
        ) from error
    except RevisionNotFoundError as error:
        raise StartupError(f"the model {name} has no revision {hub.revision}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise StartupError(
            f"there is no model {name} on the hub or on disk; a private one needs HF_TOKEN"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError, ConnectionError, JSONDecodeError) as error:
        # An earlier download is used if the hub cannot be reached.
        try:
            return _fetch_snapshot(name, replace(hub, offline=True))
        except LocalEntryNotFoundError:
            raise _missing_model_error(name, hub, error) from error
    except OSError as error:
        raise StartupError(
            f"the model {name} cannot be stored in {hub.cache}: {error}; make it writable, and "
            "large enough, or set HF_HOME to another folder"
        ) from error


def _missing_model_error(name: str, hub: HubOptions, failure: BaseException | None) -> StartupError:
    """Return the error for a model that is not on disk; `failure` is that of the hub, if any."""
    revision = f" --revision {hub.revision}" if hub.revision else ""
    return StartupError(
        f"{'' if failure is None else _describe_failure(failure)}The model {name} is not on this "
        f"machine: fetch it with `hf download {name}{revision}` where the hub can be reached, and "
        f"copy it to {hub.cache} or name its folder in the setting"
    )


def _describe_failure(failure: BaseException) -> str:
    """Return a sentence that names the proxy, without its password, and its response."""
    hub, proxies = urlsplit(constants.ENDPOINT), getproxies()
    proxy = proxies.get(hub.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(hub.hostname or ""):
        return "the hub cannot be reached. "
    if isinstance(failure, HfHubHTTPError):
        reason = f"{failure.response.status_code} {failure.response.reason_phrase}"
    elif isinstance(failure, JSONDecodeError):
        reason = "its response is not that of the hub"
    else:
        reason = str(failure).partition("\n")[0] or type(failure).__name__
    address = proxy.rpartition("@")[2].rpartition("//")[2].rstrip("/")
    return f"the hub cannot be reached through the proxy {address} ({reason}). "


def _fetch_snapshot(name: str, hub: HubOptions) -> Path:
    find = partial(
        snapshot_download,
        name,
        revision=hub.revision,
        cache_dir=hub.cache,
        allow_patterns=_INCLUDED_FILES,
    )
    if hub.offline:
        return Path(find(local_files_only=True, ignore_patterns=_EXCLUDED_FOLDERS))
    info = _fetch_info(name, hub)
    excluded = [*_EXCLUDED_FOLDERS]
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if any(file.endswith(".safetensors") and "/" not in file for file in files):
        # Files in subfolders are projections, which have no other copy.
        excluded += [file for file in files if file.endswith(".bin") and "/" not in file]
    included = filter_repo_objects(files, allow_patterns=_INCLUDED_FILES, ignore_patterns=excluded)
    sizes = {file: files[file] for file in included}
    cached = partial(try_to_load_from_cache, name, cache_dir=hub.cache, revision=info.sha)
    on_disk = {file for file in sizes if isinstance(cached(file), str)}
    with follow_download(name, hub.status, sizes, on_disk) as bar:
        snapshot = Path(find(ignore_patterns=excluded, tqdm_class=bar))
    _verify_digests(name, snapshot, set(sizes) - on_disk)
    # Processes that ended left these: the hub's library begins each download in a new file, and
    # writes to it every few seconds.
    for leftover in (snapshot.parents[1] / "blobs").glob("*.incomplete"):
        with suppress(OSError):  # Another process was faster, or the cache is read-only.
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink()
    return snapshot


def _fetch_info(name: str, hub: HubOptions) -> ModelInfo:
    """Fetch the list of a model's files; tries twice, not six times as `snapshot_download` does."""
    try:
        hooks = get_session().event_hooks["request"]
    except (ImportError, ValueError, httpx2.InvalidURL) as error:
        raise StartupError(
            "the proxy of HTTPS_PROXY, HTTP_PROXY or ALL_PROXY cannot be used: its address must "
            "begin with http:// or https://"
        ) from error
    if _set_timeouts not in hooks:
        hooks.append(_set_timeouts)
    fetch = partial(HfApi().model_info, name, revision=hub.revision, files_metadata=True)
    try:
        return fetch()
    except httpx2.TransportError:
        time.sleep(_RETRY_SECONDS)
        return fetch()


def _set_timeouts(request: httpx2.Request) -> None:
    """Set timeouts that are missing, without which the hub's library might wait forever."""
    timeouts = request.extensions.get("timeout", {})
    kinds = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {kind: timeouts.get(kind) or _HUB_TIMEOUT for kind in kinds}


def _verify_digests(name: str, snapshot: Path, files: Iterable[str]) -> None:
    """Remove a downloaded file that is damaged, and raise `StartupError`.

    The cache names a file after its ETag, which is a digest: that of git for a small file, else
    SHA-256. The hub's library compares only sizes.
    """
    for file in sorted(files):
        path = (snapshot / file).resolve()
        digest = {40: hashlib.sha1, 64: hashlib.sha256}.get(len(path.name))
        if digest is None or set(path.name) - set(string.hexdigits) or not path.is_file():
            continue
        actual = digest(usedforsecurity=False)
        if actual.digest_size == _GIT_DIGEST_BYTES:
            actual.update(f"blob {path.stat().st_size}\0".encode())
        with path.open("rb") as opened:
            while part := opened.read(AT_ONCE):
                actual.update(part)
        if actual.hexdigest() != path.name.lower():
            (snapshot / file).unlink()
            path.unlink(missing_ok=True)  # Without symbolic links it is the same file.
            raise StartupError(
                f"{file} of the model {name} did not arrive as the hub has it, and was removed: "
                "start again to download it"
            )


@contextmanager
def follow_download(
    model: str, status: DownloadStatus, sizes: dict[str, int], on_disk: set[str]
) -> Iterator[type[tqdm] | None]:
    """Report a download within the block, in `status` and every few seconds in the log.

    `sizes` holds the bytes of all files of the model, `on_disk` the files that are not downloaded.
    Yields the `tqdm_class` for the hub's library, whose bars are not drawn, or None if no file is
    missing.
    """
    total = sum(sizes.values())
    present = sum(size for file, size in sizes.items() if file in on_disk)
    if total == present:
        yield None
        return
    started = next_line = time.monotonic()
    counted: Counter[str] = Counter()
    lock = threading.Lock()

    def count(bar: str, size: int) -> None:
        nonlocal next_line
        with lock:
            counted[bar] += size
            done = min(present + max(counted.values()), total)
            status.current = download = Download(model, done, total)
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
                log.info(
                    "model_download",
                    model=model,
                    percent=download.percent,
                    done=human_size(done),
                    total=human_size(total),
                )

    class CountingBar(tqdm):
        def __init__(self, *arguments: Any, name: str | None = None, **options: Any) -> None:
            self._name = name
            super().__init__(*arguments, **options | {"disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            if self._name in _BYTE_BARS:
                count(self._name, int(n or 0))
            return None

    count("", 0)
    try:
        yield CountingBar
    finally:
        status.current = None
    seconds = round(time.monotonic() - started)
    log.info("model_downloaded", model=model, total=human_size(total), seconds=seconds)
