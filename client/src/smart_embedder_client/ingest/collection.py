"""The collection before the first chunk and after the last one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from smart_embedder_client.answers import Embeddings
from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.errors import VECTOR_SPACE_UNKNOWN, SmartEmbedderError
from smart_embedder_client.ingest.embedding import VectorOptions
from smart_embedder_client.ingest.journal import Journal
from smart_embedder_client.ingest.options import IngestError, IngestOptions, LoadOptions
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.qdrant.store import (
    DENSE,
    PAGE,
    SPARSE,
    Datatype,
    Layout,
    Origin,
    Store,
    check_model,
    differences,
    make_layout,
    pages,
)

_WORD = "width"
_NAMES_ALONE = "the {}: nothing but the model's name is compared"


@dataclass(frozen=True, slots=True)
class Served:
    """The models of the service: their names, the widths of their vectors, the longest text.

    A width is None where such vectors are not asked for. `origin` is that of a collection with
    these vectors; None of an older service, which does not tell their space.
    """

    name: str
    models: tuple[str, str, str]
    dense: int | None
    colbert: int | None
    max_tokens: int
    token_model: str | None
    origin: Origin | None


async def ask_service(
    client: AsyncClient, patience: Patience, kinds: frozenset[str], noted: Origin | None = None
) -> Served:
    """What the service has, as soon as it is ready.

    Raises `IngestError` if it does not say how long texts may be, and `SmartEmbedderError` if it
    says that its vectors are in another space than those of a collection with the origin `noted`.
    """
    spaces = [] if noted is None else noted.ids_of(kinds)

    async def probe(spaces: list[str]) -> Embeddings:
        asked = VectorOptions(kinds, "float32", spaces=spaces).request
        return await patience.wait_for(lambda: client.embed_documents([_WORD], **asked))

    try:
        answer = await probe(spaces)
    except SmartEmbedderError as error:
        if error.code != VECTOR_SPACE_UNKNOWN:
            raise
        answer = await probe([])
    health = await patience.wait_for(client.health)
    max_tokens = health.details.get("max_input_length")
    if type(max_tokens) is not int:
        raise IngestError("what answers /health does not say how many tokens a text may have")
    models = (answer.dense_model_name, answer.sparse_model_name, answer.colbert_model_name)
    return Served(
        name=answer.dense_model_name,
        models=models,
        dense=None if answer.dense is None else answer.dense.shape[1],
        colbert=None if answer.colbert is None else answer.colbert[0].shape[1],
        max_tokens=max_tokens,
        # The tokens of bge-m3, of which ColBERT's vectors are.
        token_model=None if models[0] == models[2] else models[2],
        origin=Origin(answer.vector_space, models) if answer.vector_space else None,
    )


@dataclass(frozen=True, slots=True)
class Collection:
    """A store whose collection fits the vectors of a run, which has made it if `is_new`.

    `datatype` is that of its dense and ColBERT vectors; `origin` is where the vectors of the run
    come from, None if the service does not say.
    """

    store: Store
    patience: Patience
    layout: Layout
    datatype: Datatype
    origin: Origin | None
    is_new: bool

    @classmethod
    async def prepare(
        cls,
        store: Store,
        patience: Patience,
        options: LoadOptions,
        served: Served,
        *,
        noted: Origin | None,
        note: Callable[[str], None],
    ) -> "Collection":
        """Make the collection, or check the one that exists, which has `noted` its origin.

        `note` is told where only the names of models can be compared. Raises `IngestError` if its
        vectors have other sizes or types, and `OtherSpaceError` if they are of another model.
        """
        found = await patience.ask(store.layout)
        datatype = options.datatype or (found and found.datatype) or "float32"
        wanted = make_layout(
            served.dense, served.colbert, sparse=SPARSE in options.kinds, datatype=datatype
        )
        if served.origin is None:
            note(_NAMES_ALONE.format("service does not say in which space its vectors are"))
        if found is None:
            await patience.ask(store.create, wanted, served.origin)
            return cls(store, patience, wanted, datatype, served.origin, is_new=True)
        if problems := list(differences(wanted, found)):
            raise IngestError(
                f"the collection {store.collection} does not fit the service's vectors: "
                f"{'; '.join(problems)}"
            )
        origin = served.origin
        if served.origin is None:
            await patience.ask(check_model, store, served.name)
        elif noted is None and await patience.ask(store.count, None) > 0:
            await patience.ask(check_model, store, served.name)
            note(_NAMES_ALONE.format("collection does not say in which space its vectors are"))
        else:
            origin = noted or served.origin
            # Before a vector is stored, its space is noted: there are none of the other kinds yet.
            spaces = {**served.origin.vector_space, **origin.vector_space}
            origin = replace(origin, vector_space=spaces)
            if origin != noted:
                await patience.ask(store.note_origin, origin)
        return cls(store, patience, found, datatype, origin, is_new=False)

    def ids_of(self, kinds: frozenset[str]) -> list[str]:
        """The ids of the spaces that vectors of these kinds must be of."""
        return [] if self.origin is None else self.origin.ids_of(kinds)

    async def existing(self, ids: list[str]) -> set[str]:
        """Those of the points that it has."""
        found: set[str] = set()
        # Nothing was there before this run, which asks for no point twice.
        for start in range(0, 0 if self.is_new else len(ids), PAGE):
            found |= await self.patience.ask(self.store.existing, ids[start : start + PAGE])
        return found

    async def finish(
        self, journal: Journal, options: IngestOptions, *, is_whole: bool
    ) -> tuple[int, int]:
        """Index, and with `sync` remove; how many points were removed, and how many should be.

        Nothing is removed unless the source was read whole: what is missing may be there.
        """
        # The graph was put off for the load by this run, or by one that was killed.
        if options.index and DENSE in self.layout.vectors:
            await self.patience.ask(self.store.start_indexing)
        count = partial(self.patience.ask, self.store.count, options.dataset)
        stored = await count()
        if not (options.sync and is_whole):
            return 0, max(stored - journal.seen_points, 0)
        await self.patience.ask(self._remove_unseen, journal, options.dataset)
        journal.forget_unseen()
        return stored - await count(), 0

    def _remove_unseen(self, journal: Journal, dataset: str) -> None:
        for ids in pages(self.store, dataset):
            unseen = journal.unseen(ids)
            if unseen:
                self.store.delete(unseen)
