"""Prepare a collection for the vectors of the service, and finish it after the last chunk."""

from dataclasses import dataclass, replace
from functools import partial

from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.ingest.errors import IngestError
from smart_embedder_client.ingest.journal import Journal
from smart_embedder_client.ingest.options import IngestOptions, LoadOptions
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.qdrant.store import (
    DENSE,
    PAGE,
    SPARSE,
    Datatype,
    Layout,
    Origin,
    Store,
    find_differences,
    iterate_pages,
    make_layout,
    reembed_command,
    vector_options,
)

_PROBE_TEXT = "width"


@dataclass(frozen=True, slots=True)
class Served:
    """The models of the service.

    Attributes:
        dense: The width of dense vectors; None if they are not requested.
        colbert: The width of ColBERT vectors; None if they are not requested.
        max_tokens: The maximum length of a text.
        token_model: The model whose tokens are counted; None for the service's default.
        origin: The origin of a collection with these vectors.
    """

    dense: int | None
    colbert: int | None
    max_tokens: int
    token_model: str | None
    origin: Origin

    @property
    def name(self) -> str:
        """The name of the dense model."""
        return self.origin.models[0]


async def ask_service(
    client: AsyncClient, patience: Patience, kinds: frozenset[str], origin: Origin | None = None
) -> Served:
    """Return the models of the service, as soon as it is ready.

    Raises `IngestError` if it does not report its vector spaces or the maximum length of a text,
    and `SmartEmbedderError` if its vectors have other spaces than those of `origin`.
    """
    spaces = [] if origin is None else origin.ids_of(kinds)
    options = vector_options(kinds, "float32", spaces)
    answer = await patience.wait_for(lambda: client.embed_documents([_PROBE_TEXT], **options))
    health = await patience.wait_for(client.health)
    max_tokens = health.details.get("max_input_length")
    if type(max_tokens) is not int or not answer.vector_space:
        raise IngestError(
            "the service does not report its vector spaces, or the maximum tokens of a text"
        )
    models = [answer.dense_model_name, answer.sparse_model_name, answer.colbert_model_name]
    return Served(
        dense=None if answer.dense is None else answer.dense.shape[1],
        colbert=None if answer.colbert is None else answer.colbert[0].shape[1],
        max_tokens=max_tokens,
        # ColBERT has one vector for each token of its model.
        token_model=None if models[0] == models[2] else models[2],
        origin=Origin(answer.vector_space, models),
    )


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection that fits the vectors of a run.

    `datatype` is the number type of its dense and ColBERT vectors. `origin` is that of its vectors.
    `is_new` means that the run created it.
    """

    store: Store
    patience: Patience
    layout: Layout
    datatype: Datatype
    origin: Origin
    is_new: bool

    @classmethod
    async def prepare(
        cls,
        store: Store,
        patience: Patience,
        options: LoadOptions,
        served: Served,
        *,
        origin: Origin | None,
    ) -> "Collection":
        """Create the collection, or check the existing one, whose vectors have this origin.

        Raises `IngestError` if the vectors have other sizes or types, or an unknown origin.
        """
        found = await patience.call(store.layout)
        datatype = options.datatype or (found and found.datatype) or "float32"
        required = make_layout(
            served.dense, served.colbert, sparse=SPARSE in options.kinds, datatype=datatype
        )
        if found is None:
            await patience.call(store.create, required, served.origin)
            new = cls(store, patience, required, datatype, served.origin, is_new=True)
            return await new._check_origin()
        if problems := list(find_differences(required, found)):
            raise IngestError(
                f"the collection {store.collection} does not fit the service's vectors: "
                f"{'; '.join(problems)}"
            )
        if origin is None and await patience.call(store.count, None) > 0:
            raise IngestError(
                f"the collection {store.collection} does not say in which space its vectors are, "
                f"which could be another one: {reembed_command(store.collection)}"
            )
        stored = origin or served.origin
        # A kind that the origin lacks has no vectors yet: its space is stored before the first.
        spaces = {**served.origin.vector_space, **stored.vector_space}
        stored = replace(stored, vector_space=spaces)
        existing = cls(store, patience, found, datatype, stored, is_new=False)
        if stored == origin:
            return existing
        await patience.call(store.set_origin, stored)
        return await existing._check_origin()

    async def _check_origin(self) -> "Collection":
        if await self.patience.call(self.store.origin) != self.origin:
            raise IngestError("this Qdrant does not store metadata of a collection: 1.16 does")
        return self

    async def existing(self, ids: list[str]) -> set[str]:
        """Return the ids of points that exist."""
        found: set[str] = set()
        # A new collection has no points but those of this run, which asks for none twice.
        for start in range(0, 0 if self.is_new else len(ids), PAGE):
            found |= await self.patience.call(self.store.existing, ids[start : start + PAGE])
        return found

    async def start_indexing(self, options: LoadOptions) -> None:
        """Start to build the HNSW graph, which this run or a killed one left for the end."""
        if options.index and DENSE in self.layout.vectors:
            await self.patience.call(self.store.start_indexing)

    async def sync(
        self, journal: Journal, options: IngestOptions, *, is_complete: bool
    ) -> tuple[int, int]:
        """Remove stale points, and return how many were removed and how many are left.

        Points are removed with the option `sync`, and only if the source was read completely.
        """
        count = partial(self.patience.call, self.store.count, options.dataset)
        stored = await count()
        if not (options.sync and is_complete):
            return 0, max(stored - journal.seen_points, 0)
        await self.patience.call(self._remove_unseen, journal, options.dataset)
        journal.forget_unseen()
        return stored - await count(), 0

    def _remove_unseen(self, journal: Journal, dataset: str) -> None:
        for ids in iterate_pages(self.store, dataset):
            unseen = journal.unseen(ids)
            if unseen:
                self.store.delete(unseen)
