"""Chunks to vectors that Qdrant takes, whatever happens to the service in between."""

from collections.abc import Sequence
from dataclasses import dataclass

from smart_embedder_client.answers import Embeddings
from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.options import EmbedOptions
from smart_embedder_client.qdrant.store import COLBERT, DENSE, SPARSE, Datatype, Vectors

# RFC 9218: a bulk load has the lowest priority.
BACKGROUND = 7
_REFUSED = {400, 413, 422, 500}
_TIMEOUT, _OUT_OF_MEMORY = 504, "out_of_memory"


class _FewerMayPassError(Exception):
    """The texts were refused together."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something is not in the collection."""

    reason: str


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """Which vectors are made: their kinds, their type, and how many ColBERT vectors become one.

    They are made in the spaces of these ids, or refused.
    """

    kinds: frozenset[str]
    datatype: Datatype
    colbert_pool_factor: int | None = None
    spaces: Sequence[str] = ()

    @property
    def request(self) -> EmbedOptions:
        """The options of a request."""
        return {
            "return_dense": DENSE in self.kinds,
            "return_sparse": SPARSE in self.kinds,
            "return_colbert": COLBERT in self.kinds,
            "output_dtype": self.datatype,
            "if_vector_space": self.spaces,
        }


class Embedder:
    """Embeds batches of chunks.

    Texts with more than `most_colbert_vectors` have theirs pooled by as little as makes them fit
    into a point. `pooled` counts these chunks, `truncated` those longer than the model reads.
    """

    def __init__(
        self,
        client: AsyncClient,
        options: VectorOptions,
        patience: Patience,
        most_colbert_vectors: int | None,
    ) -> None:
        self._client = client
        self._options = options
        self._patience = patience
        self._most = most_colbert_vectors
        self.pooled = 0
        self.truncated = 0

    async def embed(self, texts: Sequence[str]) -> list[Vectors | Refusal]:
        """The vectors of each text, or why it has none.

        Raises `SmartEmbedderError` if the service is away for too long, or refuses everything.
        """
        try:
            answer = await self._ask(texts, self._options.colbert_pool_factor)
        except _FewerMayPassError:
            half = len(texts) // 2
            return [*await self.embed(texts[:half]), *await self.embed(texts[half:])]
        except SmartEmbedderError as error:
            if len(texts) > 1 or not _is_refusal(error):
                raise
            return [Refusal(str(error))]
        self.truncated += len({each["target"]["index"] for each in answer.warnings})
        return [await self._fit(text, _of_text(answer, i)) for i, text in enumerate(texts)]

    async def _ask(self, texts: Sequence[str], pool_factor: int | None) -> Embeddings:
        options = self._options.request
        if pool_factor is not None and COLBERT in self._options.kinds:
            options["colbert_pool_factor"] = pool_factor

        async def attempt() -> Embeddings:
            try:
                return await self._client.embed_documents(texts, priority=BACKGROUND, **options)
            except SmartEmbedderError as error:
                if len(texts) > 1 and (_is_refusal(error) or error.status == _TIMEOUT):
                    raise _FewerMayPassError from error
                raise

        return await self._patience.wait_for(attempt)

    async def _fit(self, text: str, vectors: Vectors) -> Vectors:
        """The same with few enough ColBERT vectors."""
        if vectors.colbert is None or self._most is None or len(vectors.colbert) <= self._most:
            return vectors
        factor = self._options.colbert_pool_factor or 1
        while vectors.colbert is not None and len(vectors.colbert) > self._most:
            factor += 1
            vectors = _of_text(await self._ask([text], factor), 0)
        self.pooled += 1
        return vectors


def _is_refusal(error: SmartEmbedderError) -> bool:
    return error.status in _REFUSED or error.code == _OUT_OF_MEMORY


def _of_text(answer: Embeddings, place: int) -> Vectors:
    sparse = None if answer.sparse is None else answer.sparse[place]
    return Vectors(
        None if answer.dense is None else answer.dense[place],
        # A text without known tokens has no weights.
        sparse if sparse is not None and len(sparse.indices) else None,
        None if answer.colbert is None else answer.colbert[place],
    )
