"""Embed chunks, so that their vectors fit into points of Qdrant."""

from collections.abc import Sequence
from dataclasses import dataclass

from smart_embedder_client.answers import Embeddings
from smart_embedder_client.async_client import AsyncClient
from smart_embedder_client.errors import SmartEmbedderError
from smart_embedder_client.ingest.options import Report
from smart_embedder_client.ingest.pace import Patience
from smart_embedder_client.options import EmbedOptions
from smart_embedder_client.qdrant.store import TextVectors
from smart_embedder_client.streams import BULK_PRIORITY, Embedded, embed_each, is_text_error


@dataclass(frozen=True, slots=True)
class Embedder:
    """Embeds batches of chunks.

    If a text has more than `max_colbert_vectors`, they are pooled by the smallest factor that makes
    them fit. `report` counts pooled and truncated chunks.
    """

    client: AsyncClient
    options: EmbedOptions
    patience: Patience
    max_colbert_vectors: int | None
    report: Report

    async def embed(self, texts: Sequence[str]) -> list[TextVectors | SmartEmbedderError]:
        """Return the vectors of each text, or the reason why it has none.

        Raises `SmartEmbedderError` if the service is away for too long, or refuses every request.
        """
        found = await embed_each(texts, lambda some: self._request(some, self.options))
        rows = zip(texts, found, strict=True)
        return [await self._read(text, result) for text, result in rows]

    async def _request(self, texts: Sequence[str], options: EmbedOptions) -> Embeddings:
        # Halves are tried before the same batch again.
        return await self.patience.wait_for(
            lambda: self.client.embed_documents(texts, priority=BULK_PRIORITY, **options),
            is_final=lambda error: len(texts) > 1 and is_text_error(error),
        )

    async def _read(self, text: str, result: Embedded) -> TextVectors | SmartEmbedderError:
        """Return the vectors of one text; request pooled ones if there are too many for a point."""
        if isinstance(result, SmartEmbedderError):
            return result
        response, index = result
        warnings = response.warnings
        self.report.truncated += any(warning["target"]["index"] == index for warning in warnings)
        vectors = TextVectors.of_response(response, index)
        limit, factor = self.max_colbert_vectors, self.options.get("colbert_pool_factor") or 1
        if vectors.colbert is None or limit is None or len(vectors.colbert) <= limit:
            return vectors
        while vectors.colbert is not None and len(vectors.colbert) > limit:
            factor += 1
            options: EmbedOptions = {**self.options, "colbert_pool_factor": factor}
            vectors = TextVectors.of_response(await self._request([text], options), 0)
        self.report.pooled += 1
        return vectors
