"""Cached vectors in a Redis that several processes share; while it is away, they are computed.

An entry is a safetensors file, so that reading it runs no code. What Redis answers is believed only
as far as it can be what the model makes of a text; anything else counts as missing.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog
from safetensors import SafetensorError
from safetensors.numpy import load, save

from smart_embedder.access import rate_limit
from smart_embedder.engine.model import Embedder
from smart_embedder.engine.records import (
    AnswerMemory,
    Outputs,
    SparseVector,
    TextEmbedding,
    TokenizedText,
)
from smart_embedder.errors import StartupError

log = structlog.get_logger(__name__)

Array = npt.NDArray[Any]

KINDS: Final = ("dense", "sparse", "colbert", "states")
# Python's objects around the arrays of an entry, and its places in the cache's dictionaries.
_OVERHEAD_BYTES = 1200
# Of unit length, in any number format that is sent.
_LENGTH_TOLERANCE = 0.01
# Above every vocabulary; the upper bits of `ids` are marks.
_MOST_TOKEN_IDS = 1 << 28
_NAMESPACE = "smart-embedder:vectors:"
# Since an entry was written.
_SECONDS_TO_LIVE = 7 * 24 * 3600
# ColBERT vectors of 256 tokens: those of longer texts are computed sooner than they are sent.
MOST_ENTRY_BYTES = 2**20
_MOST_PENDING_BYTES = 2**26
# Keys in one call, few of them for large entries: a slow network must answer in REDIS_TIMEOUT.
_FEW, _MANY = 8, 256
# For each kind, its arrays: their types and numbers of dimensions.
_SHAPES: Final[dict[str, dict[str, tuple[type, int]]]] = {
    "dense": {"dense": (np.float32, 1)},
    "sparse": {"indices": (np.int64, 1), "values": (np.float32, 1)},
    "colbert": {"colbert": (np.float32, 2)},
    "states": {"states": (np.float32, 2)},
}
_MAXMEMORY = re.compile(rb"^maxmemory:(\d+)\r?$", re.MULTILINE)
_OF_EACH: Final[dict[str, tuple[type, int]]] = {"ids": (np.int32, 1), "length": (np.int64, 1)}


@dataclass(frozen=True, slots=True)
class CachedVectors:
    """One kind of vectors of one text: read-only `arrays` by name.

    `ids` are the tokens that were read, int32 `[tokens]`; the rest is as in `TokenizedText`.
    """

    ids: npt.NDArray[np.int32]
    original_tokens: int
    exact: bool
    arrays: Mapping[str, Array]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that it takes."""
        arrays = sum(array.nbytes for array in self.arrays.values())
        return arrays + self.ids.nbytes + _OVERHEAD_BYTES

    def copied(self) -> "CachedVectors":
        """A copy of the entry, whose arrays may be views of the results of a whole batch."""
        arrays = {name: read_only(array.copy()) for name, array in self.arrays.items()}
        return CachedVectors(read_only(self.ids.copy()), self.original_tokens, self.exact, arrays)


def kinds_of(outputs: Outputs) -> list[str]:
    """The names of the kinds that are wanted."""
    return [kind for kind in KINDS if getattr(outputs, kind)]


def split(text: TokenizedText, embedding: TextEmbedding) -> dict[str, CachedVectors]:
    """An entry for each kind of vectors of a text."""
    ids = read_only(text.ids.astype(np.int32))
    arrays: dict[str, dict[str, Array]] = {
        kind: {kind: read_only(vectors)}
        for kind in ("dense", "colbert", "states")
        if (vectors := getattr(embedding, kind)) is not None
    }
    if embedding.sparse is not None:
        indices, values = read_only(embedding.sparse.indices), read_only(embedding.sparse.values)
        arrays["sparse"] = {"indices": indices, "values": values}
    return {
        kind: CachedVectors(ids, text.original_tokens, text.exact, own)
        for kind, own in arrays.items()
    }


def join(entries: Mapping[str, CachedVectors]) -> tuple[TokenizedText, TextEmbedding]:
    """The inverse of `split`, for at least one entry."""
    first = next(iter(entries.values()))
    arrays = {name: array for each in entries.values() for name, array in each.arrays.items()}
    sparse = SparseVector(arrays["indices"], arrays["values"]) if "sparse" in entries else None
    return (
        TokenizedText(first.ids.astype(np.int64), first.original_tokens, first.exact),
        TextEmbedding(
            dense=arrays.get("dense"),
            sparse=sparse,
            colbert=arrays.get("colbert"),
            states=arrays.get("states"),
        ),
    )


def of_one_text(entries: Iterable[CachedVectors]) -> bool:
    """Whether all of them are of the same tokens, as the kinds of one text are."""
    first, *others = entries
    return all(
        each.original_tokens == first.original_tokens
        and each.exact == first.exact
        and each.ids.tobytes() == first.ids.tobytes()
        for each in others
    )


def problem_of(entry: CachedVectors, kind: str, model: Embedder) -> str | None:
    """Why an entry of this kind cannot be what `model` makes of a text; None where it can.

    Its arrays have the types and the numbers of dimensions of the kind.
    """
    if (entry.ids < 0).any() or entry.original_tokens < len(entry.ids):
        return "its tokens are not those of a text"
    if not all(np.isfinite(array).all() for array in entry.arrays.values()):
        return "a number is not finite"
    if kind != "sparse":
        return _problem_of_rows(np.atleast_2d(entry.arrays[kind]), entry.ids, kind, model)
    indices, values = entry.arrays["indices"], entry.arrays["values"]
    if indices.shape != values.shape:
        return "there is not one weight for each index"
    if not ((indices >= 0) & (indices < _MOST_TOKEN_IDS)).all() or (np.diff(indices) <= 0).any():
        return "the indices are not ascending token ids"
    return None if (values > 0).all() else "a weight is not above zero"


def _problem_of_rows(
    rows: Array, ids: npt.NDArray[np.int32], kind: str, model: Embedder
) -> str | None:
    wanted = {
        "dense": (1, model.dense_width),
        "colbert": (len(model.colbert_tokens(ids.astype(np.int64))), model.colbert_width),
        "states": (len(ids), model.states_width),
    }[kind]
    if rows.shape != wanted:
        return f"{rows.shape} numbers are not the {wanted} of the model"
    if not rows.any(axis=1).all():
        return "a vector is zero"
    if kind == "colbert" or (kind == "dense" and model.normalizes):
        # In float64, in which no square of a float32 overflows.
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
        if (np.abs(lengths - 1) > _LENGTH_TOLERANCE).any():
            return "a vector has not unit length"
    return None


def read_only(array: Array) -> Array:
    """A read-only view of the array."""
    view = array.view()
    view.flags.writeable = False
    return view


class SharedVectors:
    """Entries in a Redis, by keys that end with `:` and the kind.

    `on_error` is called for each failure, and for each entry that cannot be right; the first of
    these is logged. Neither the address nor its password is ever logged.
    """

    def __init__(self, url: str, on_error: Callable[[], None]) -> None:
        if find_spec("redis") is None:
            raise StartupError(
                "EMBEDDING_CACHE names a Redis, and the package redis is not installed: "
                "pip install 'smart-embedder[cluster]'"
            )
        # An extra, and a third of a second to import.
        from redis.asyncio import Redis  # noqa: PLC0415
        from redis.exceptions import RedisError  # noqa: PLC0415

        timeout = rate_limit.REDIS_TIMEOUT
        self._client: Any = Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout
        )
        # The library's own fails on an answer that is no text.
        self._client.set_response_callback("INFO", lambda response, **_: response)
        self._on_error = on_error
        self._breaker = rate_limit.CircuitBreaker(
            "embedding_cache_store",
            on_error,
            (RedisError,),
            while_gone="what other processes have computed is computed again",
            when_back="vectors are shared again",
        )
        self._pending_bytes = 0
        self._writes: set[asyncio.Task[None]] = set()
        self._bound_checked = False
        self._has_warned = False

    async def fetch(
        self, models: Mapping[str, Embedder], memory: AnswerMemory
    ) -> dict[str, CachedVectors]:
        """The entries that Redis has, by the keys of `models`, which made them.

        `memory` is asked for room for each call's entries before those of the next are fetched;
        raises as `AnswerMemory.need`.
        """
        found: dict[str, CachedVectors] = {}
        size = 0
        for some in _by_size([*models]):
            names = [_NAMESPACE + key for key in some]
            answer = await self._breaker.call(partial(self._client.mget, names))
            if answer is None:
                continue
            if not isinstance(answer, list) or len(answer) != len(some):
                self._refuse("the answer is no list of values")
                continue
            values = {key: each for key, each in zip(some, answer, strict=True) if each}
            read = await asyncio.to_thread(_decode_all, values, models) if values else {}
            for key, entry in read.items():
                if isinstance(entry, str):
                    self._refuse(entry)
                else:
                    found[key] = entry
                    size += sum(array.nbytes for array in entry.arrays.values())
            memory.need(size, "the vectors of these texts", "send fewer texts or shorter ones")
        await self._check_bound()
        return found

    def _refuse(self, reason: str) -> None:
        """Count what cannot be right; tell of the first one only, for there may be many."""
        self._on_error()
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "embedding_cache_entry_refused",
                reason=reason,
                effect="it counts as missing; later ones are only counted",
                advice="see who else writes to the Redis of EMBEDDING_CACHE",
            )

    def put(self, entries: Mapping[str, CachedVectors]) -> None:
        """Write entries in the background; drop them if too many bytes are being written."""
        small = {key: each for key, each in entries.items() if each.nbytes <= MOST_ENTRY_BYTES}
        size = sum(each.nbytes for each in small.values())
        if not small or self._pending_bytes + size > _MOST_PENDING_BYTES:
            return
        self._pending_bytes += size
        task = asyncio.create_task(self._write(small, size), name="share-vectors")
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    async def _write(self, entries: Mapping[str, CachedVectors], size: int) -> None:
        try:
            for some in _by_size([*entries]):
                encoded = await asyncio.to_thread(
                    list, map(_encode, [entries[key] for key in some])
                )
                values = dict(zip(some, encoded, strict=True))
                await self._breaker.call(partial(self._set, values))
        finally:
            self._pending_bytes -= size

    async def _set(self, values: Mapping[str, bytes]) -> bool:
        async with self._client.pipeline(transaction=False) as pipe:
            for key, value in values.items():
                pipe.set(_NAMESPACE + key, value, ex=_SECONDS_TO_LIVE)
            await pipe.execute()
        return True

    async def _check_bound(self) -> None:
        """Warn once if Redis has no limit of memory."""
        if self._bound_checked:
            return
        memory = await self._breaker.call(partial(self._client.info, "memory"))
        if isinstance(memory, bytes) and not self._bound_checked:
            self._bound_checked = True
            found = _MAXMEMORY.search(memory)
            if found is None or not int(found[1]):
                log.warning(
                    "embedding_cache_store_unbounded",
                    reason="the Redis of EMBEDDING_CACHE has no maxmemory",
                    advice="set maxmemory, and maxmemory-policy to allkeys-lru",
                )

    async def close(self) -> None:
        """Write nothing any more, and close the connections."""
        for task in list(self._writes):
            task.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        await self._client.aclose(close_connection_pool=True)


def _kind(key: str) -> str:
    return key.rpartition(":")[2]


def _by_size(keys: Sequence[str]) -> Iterator[list[str]]:
    """Split the keys into those of one call each: entries with token vectors are large."""
    few = [key for key in keys if _kind(key) in {"colbert", "states"}]
    many = [key for key in keys if _kind(key) not in {"colbert", "states"}]
    for some, count in ((few, _FEW), (many, _MANY)):
        yield from (some[i : i + count] for i in range(0, len(some), count))


def _encode(entry: CachedVectors) -> bytes:
    length = np.array([entry.original_tokens, entry.exact], np.int64)
    encoded: bytes = save({"ids": entry.ids, "length": length, **entry.arrays})
    return encoded


def _decode_all(
    values: Mapping[str, object], models: Mapping[str, Embedder]
) -> dict[str, CachedVectors | str]:
    return {key: _decode(value, _kind(key), models[key]) for key, value in values.items()}


def _decode(value: object, kind: str, model: Embedder) -> CachedVectors | str:
    """The entry; why it is none where it cannot be one of this kind by `model`."""
    if not isinstance(value, bytes) or len(value) > MOST_ENTRY_BYTES:
        return "a value is no entry"
    try:
        arrays = {name: read_only(array) for name, array in load(value).items()}
    except (SafetensorError, KeyError, ValueError):
        return "a value is no entry"
    wanted = _OF_EACH | _SHAPES[kind]
    if {name: (array.dtype.type, array.ndim) for name, array in arrays.items()} != wanted:
        return "a value is no entry of its kind"
    ids, length = arrays.pop("ids"), arrays.pop("length")
    if length.shape != (2,):
        return "a value is no entry of its kind"
    entry = CachedVectors(ids, int(length[0]), bool(length[1]), arrays)
    return problem_of(entry, kind, model) or entry
