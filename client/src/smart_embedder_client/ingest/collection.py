"""The collection before the first chunk and after the last one."""

from dataclasses import dataclass

from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.ingest.embedding import VectorOptions
from smart_embedder_client.ingest.journal import Journal
from smart_embedder_client.ingest.options import IngestError, IngestOptions
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.qdrant.store import (
    DENSE,
    MODEL,
    PAGE,
    SPARSE,
    Datatype,
    Layout,
    Store,
    differences,
    make_layout,
)

_WORD = "width"


@dataclass(frozen=True, slots=True)
class Served:
    """The models of the service: their names, the widths of their vectors, the longest text.

    A width is None where such vectors are not asked for.
    """

    name: str
    models: tuple[str, str, str]
    dense: int | None
    colbert: int | None
    max_tokens: int
    token_model: str | None


async def ask_service(client: AsyncClient, patience: Patience, kinds: frozenset[str]) -> Served:
    """What the service has, as soon as it is ready.

    Raises `IngestError` if it does not say how long texts may be.
    """
    asked = VectorOptions(kinds, "float32").request
    answer = await patience.wait_for(lambda: client.embed([_WORD], **asked))
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
    )


@dataclass(frozen=True, slots=True)
class Collection:
    """A store whose collection fits the vectors of a run, which has made it if `is_new`.

    `datatype` is that of its dense and ColBERT vectors.
    """

    store: Store
    patience: Patience
    layout: Layout
    datatype: Datatype
    is_new: bool

    @classmethod
    async def prepare(
        cls, store: Store, patience: Patience, name: str, options: IngestOptions, served: Served
    ) -> "Collection":
        """Make the collection, or check the one that exists.

        Raises `IngestError` if its vectors are others, or of another model.
        """
        found = await patience.ask(store.layout)
        datatype = options.datatype or (found and found.datatype) or "float32"
        wanted = make_layout(
            served.dense, served.colbert, sparse=SPARSE in options.kinds, datatype=datatype
        )
        if found is None:
            await patience.ask(store.create, wanted)
            return cls(store, patience, wanted, datatype, is_new=True)
        if problems := list(differences(wanted, found)):
            raise IngestError(
                f"the collection {name} does not fit the service's vectors: {'; '.join(problems)}"
            )
        model = (await patience.ask(store.any_payload) or {}).get(MODEL)
        if model not in {None, served.name}:
            raise IngestError(
                f"the collection {name} has vectors of {model}, and the service makes those of "
                f"{served.name}: give the collection another name, or make it anew"
            )
        return cls(store, patience, found, datatype, is_new=False)

    async def count(self, dataset: str) -> int:
        """How many points a data set has."""
        return await self.patience.ask(self.store.count, dataset)

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
        stored = await self.count(options.dataset)
        if not (options.sync and is_whole):
            return 0, max(stored - journal.seen_points, 0)
        await self.patience.ask(self._remove_unseen, journal, options.dataset)
        journal.forget_unseen()
        return stored - await self.count(options.dataset), 0

    def _remove_unseen(self, journal: Journal, dataset: str) -> None:
        for ids in self.store.pages(dataset):
            unseen = journal.unseen(ids)
            if unseen:
                self.store.delete(unseen)
