"""The start of a run: opens and checks what it needs."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.client import Client
from smart_embedder_client.ingest.chunking import (
    SPECIAL_TOKENS,
    Chunker,
    FileChunker,
    ServiceChunker,
)
from smart_embedder_client.ingest.collection import Collection, Served, ask_service
from smart_embedder_client.ingest.embedding import Embedder, VectorOptions
from smart_embedder_client.ingest.identity import Recipe
from smart_embedder_client.ingest.journal import Journal
from smart_embedder_client.ingest.options import IngestError, IngestOptions, Report
from smart_embedder_client.ingest.patience import Patience
from smart_embedder_client.ingest.progress import Progress
from smart_embedder_client.ingest.run import Ingest
from smart_embedder_client.ingest.sources import encodable_name, input_bytes
from smart_embedder_client.qdrant.layout import COLBERT
from smart_embedder_client.qdrant.open_store import Target, open_store
from smart_embedder_client.qdrant.store import Store

_SOURCE_PATH = "source path"
_OTHER_THREADS = 4


def default_journal(target: Target, dataset: str) -> Path:
    """The file for a data set in a collection, in the user's folder for the state of programs."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    told = f"{target.address}\n{target.collection}\n{dataset}"
    name = hashlib.sha256(told.encode()).hexdigest()[:16]
    return Path(state, "smart-embedder", f"ingest-{name}.sqlite")


async def ingest(
    options: IngestOptions,
    target: Target,
    url: str,
    token: str | None = None,
    journal: Path | None = None,
) -> Report:
    """Load a source into a collection; the same call goes on after an interruption.

    Args:
        options: What is loaded, and how.
        target: The collection.
        url: The service's address.
        token: Its access token, if one is set.
        journal: Where it is noted what is stored.

    Raises:
        IngestError, JournalError, QdrantError, SmartEmbedderError, SourceError: Why the run
            stopped, in one sentence.
    """
    # Each upload waits in a thread, beside those that read and split.
    threads = ThreadPoolExecutor(options.streams + _OTHER_THREADS, "ingest")
    asyncio.get_running_loop().set_default_executor(threads)
    path = journal or default_journal(target, options.dataset)
    async with _open(options, target, path, url, token) as opened:
        prepared = await _prepare(options, target.collection, opened)
        return await prepared.run()


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a run uses and closes; `token_client` counts tokens in a thread."""

    client: AsyncClient
    token_client: Client
    journal: Journal
    store: Store
    progress: Progress


@asynccontextmanager
async def _open(
    options: IngestOptions, target: Target, journal: Path, url: str, token: str | None
) -> AsyncIterator[_Opened]:
    size = await asyncio.to_thread(input_bytes, options.source)
    # Outages are waited for by `Patience`.
    async with AsyncClient(url, token=token, max_retries=0) as client:
        with (
            Client(url, token=token, max_retries=0) as token_client,
            Journal(journal) as notes,
            closing(await asyncio.to_thread(open_store, target)) as store,
            Progress(size, options.dataset) as progress,
        ):
            yield _Opened(client, token_client, notes, store, progress)


async def _prepare(options: IngestOptions, name: str, opened: _Opened) -> Ingest:
    """Check that the service, the journal and the collection `name` fit, and make what is left."""
    journal, progress = opened.journal, opened.progress
    patience = Patience(options.patience, progress.note)
    served = await ask_service(opened.client, patience, options.kinds)
    _check_length(options, served)
    _check_path(journal, options)
    collection = await Collection.prepare(opened.store, patience, name, options, served)
    await _check_notes(journal, collection, options)
    progress.tell(f"{options.source} goes into {name} by {opened.store.transport}")
    limit = _chunk_limit(options, collection, progress)
    vectors = VectorOptions(options.kinds, collection.datatype, options.colbert_pool_factor)
    most = collection.layout.most_colbert_vectors
    return Ingest(
        options=options,
        recipe=_recipe(options, served, vectors, limit),
        model=served.name,
        collection=collection,
        chunker=_chunker(options, opened.token_client, served, limit),
        embedder=Embedder(opened.client, vectors, patience, most),
        journal=journal,
        patience=patience,
        progress=progress,
    )


def _check_length(options: IngestOptions, served: Served) -> None:
    if options.chunk_tokens > served.max_tokens:
        raise IngestError(
            f"chunks of {options.chunk_tokens} tokens are longer than the {served.max_tokens} that "
            "the service reads of a text"
        )
    if not options.overlap < options.chunk_tokens - SPECIAL_TOKENS:
        raise IngestError(
            f"an overlap of {options.overlap} tokens needs chunks of more than "
            f"{options.overlap + SPECIAL_TOKENS}"
        )


def _check_path(notes: Journal, options: IngestOptions) -> None:
    """Two folders of the same name must not remove each other's points."""
    path, before = encodable_name(str(options.source.resolve())), notes.fact(_SOURCE_PATH)
    if options.sync and before not in (None, path):
        raise IngestError(
            f"the data set {options.dataset} was ingested from {before} before, so {path} may not "
            "remove its points: --dataset gives this one another name"
        )
    if before is None:
        notes.note(_SOURCE_PATH, path)


async def _check_notes(notes: Journal, collection: Collection, options: IngestOptions) -> None:
    """Trust the journal unless the collection has less than that says."""
    if options.recheck or await collection.count(options.dataset) < notes.points:
        notes.forget()


def _chunk_limit(options: IngestOptions, collection: Collection, progress: Progress) -> int:
    most = collection.layout.most_colbert_vectors
    # ColBERT has a vector for each token but the first.
    if COLBERT not in options.kinds or most is None or options.chunk_tokens <= most + 1:
        return options.chunk_tokens
    if options.split_for_colbert:
        progress.note(f"chunks have at most {most + 1} tokens, so that ColBERT fits into a point")
        return most + 1
    progress.note(f"of chunks with more than {most} ColBERT vectors, these are pooled")
    return options.chunk_tokens


def _recipe(
    options: IngestOptions, served: Served, vectors: VectorOptions, chunk_tokens: int
) -> Recipe:
    return Recipe(
        options.dataset,
        (*served.models, sorted(vectors.kinds), vectors.datatype, vectors.colbert_pool_factor),
        (chunk_tokens, options.overlap),
    )


def _chunker(options: IngestOptions, client: Client, served: Served, chunk_tokens: int) -> Chunker:
    if options.tokenizer is not None:
        return FileChunker(options.tokenizer, chunk_tokens, options.overlap)

    def count(texts: Sequence[str]) -> Sequence[int]:
        return client.count_tokens(texts, model=served.token_model)

    return ServiceChunker(count, chunk_tokens, options.overlap)
