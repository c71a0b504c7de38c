"""Embed chunks, so that their vectors fit into points of Qdrant."""

from collections.abc import Sequence
from dataclasses import dataclass

from smart_embedder_client.answers import Embeddings
from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.options import Report
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.options import EmbedOptions
from smart_embedder_client.qdrant.store import COLBERT, DENSE, SPARSE, Datatype, TextVectors
from smart_embedder_client.streams import BULK_PRIORITY

_REFUSED = {400, 413, 422, 500}
_TIMEOUT, _OUT_OF_MEMORY = 504, "out_of_memory"


class _BatchRefusedError(Exception):
    """A batch was refused; a part of it may be accepted."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a text has no vectors."""

    reason: str


@dataclass(frozen=True, slots=True)
class VectorOptions:
    """The kinds and the number type of the vectors that are requested.

    `colbert_pool_factor` is the number of ColBERT vectors that are pooled into one. `spaces` are
    the ids of the vector spaces that the service must have.
    """

    kinds: frozenset[str]
    datatype: Datatype
    colbert_pool_factor: int | None = None
    spaces: Sequence[str] = ()

    @property
    def request(self) -> EmbedOptions:
        """The options of `Client.embed`."""
        return {
            "return_dense": DENSE in self.kinds,
            "return_sparse": SPARSE in self.kinds,
            "return_colbert": COLBERT in self.kinds,
            "output_dtype": self.datatype,
            "if_vector_space": self.spaces,
        }


class Embedder:
    """Embeds batches of chunks.

    If a text has more than `max_colbert_vectors`, they are pooled by the smallest factor that makes
    them fit. `report` counts pooled and truncated chunks.
    """

    def __init__(
        self,
        client: AsyncClient,
        options: VectorOptions,
        patience: Patience,
        max_colbert_vectors: int | None,
        report: Report,
    ) -> None:
        self._client = client
        self._options = options
        self._patience = patience
        self._max_vectors = max_colbert_vectors
        self._report = report

    async def embed(self, texts: Sequence[str]) -> list[TextVectors | Refusal]:
        """Return the vectors of each text, or the reason why it has none.

        Raises `SmartEmbedderError` if the service is away for too long, or refuses every request.
        """
        try:
            answer = await self._request(texts, self._options.colbert_pool_factor)
        except _BatchRefusedError:
            half = len(texts) // 2
            return [*await self.embed(texts[:half]), *await self.embed(texts[half:])]
        except SmartEmbedderError as error:
            if len(texts) > 1 or not _is_refusal(error):
                raise
            return [Refusal(str(error))]
        self._report.truncated += len({warning["target"]["index"] for warning in answer.warnings})
        return [
            await self._pool(text, _read_vectors(answer, index)) for index, text in enumerate(texts)
        ]

    async def _request(self, texts: Sequence[str], pool_factor: int | None) -> Embeddings:
        options = self._options.request
        if pool_factor is not None and COLBERT in self._options.kinds:
            options["colbert_pool_factor"] = pool_factor

        async def attempt() -> Embeddings:
            try:
                return await self._client.embed_documents(texts, priority=BULK_PRIORITY, **options)
            except SmartEmbedderError as error:
                if len(texts) > 1 and (_is_refusal(error) or error.status == _TIMEOUT):
                    raise _BatchRefusedError from error
                raise

        return await self._patience.wait_for(attempt)

    async def _pool(self, text: str, vectors: TextVectors) -> TextVectors:
        """Request pooled ColBERT vectors if there are too many for a point."""
        max_vectors = self._max_vectors
        if vectors.colbert is None or max_vectors is None or len(vectors.colbert) <= max_vectors:
            return vectors
        factor = self._options.colbert_pool_factor or 1
        while vectors.colbert is not None and len(vectors.colbert) > max_vectors:
            factor += 1
            vectors = _read_vectors(await self._request([text], factor), 0)
        self._report.pooled += 1
        return vectors


def _is_refusal(error: SmartEmbedderError) -> bool:
    return error.status in _REFUSED or error.code == _OUT_OF_MEMORY


def _read_vectors(answer: Embeddings, index: int) -> TextVectors:
    sparse = None if answer.sparse is None else answer.sparse[index]
    return TextVectors(
        None if answer.dense is None else answer.dense[index],
        # A text of which the tokenizer knows nothing has no weights.
        sparse if sparse is not None and len(sparse.indices) else None,
        None if answer.colbert is None else answer.colbert[index],
    )
