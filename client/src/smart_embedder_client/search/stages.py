"""One question through all stages: dense and sparse, their fusion, then ColBERT or reranking."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from smart_embedder_client.client import Client
from smart_embedder_client.options import EmbedOptions
from smart_embedder_client.qdrant.errors import QdrantError
from smart_embedder_client.qdrant.layout import COLBERT, DENSE, SPARSE, Layout
from smart_embedder_client.qdrant.store import MODEL, TEXT, Depths, Hit, Store, Vectors

Rescore = Literal["colbert", "rerank", "none"]

FUSED, RERANK = "fused", "rerank"
STAGES = (DENSE, SPARSE, FUSED, COLBERT, RERANK)


@dataclass(frozen=True, slots=True)
class Score:
    """What one stage says of a passage; `rank` begins with 1."""

    score: float
    rank: int


@dataclass(frozen=True, slots=True)
class Found:
    """One passage, with the score of every stage that it has reached."""

    id: str
    payload: Mapping[str, Any]
    scores: Mapping[str, Score] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The passage."""
        return str(self.payload.get(TEXT, ""))


def find(client: Client, store: Store, query: str, depths: Depths, rescore: Rescore) -> list[Found]:
    """The best passages by the last stage, which `rescore` chooses.

    Raises:
        QdrantError: There is no collection, or its vectors are of another model.
        SmartEmbedderError: The service does not answer.
    """
    layout = store.layout()
    if layout is None or not layout.kinds & {DENSE, SPARSE}:
        raise QdrantError("there is no such collection with dense or sparse vectors")
    vectors = _embed(client, store, query, layout, with_colbert=rescore == "colbert")
    stages = store.search(vectors, depths)
    last = stages.get(COLBERT, stages[FUSED])
    if rescore == "rerank" and last:
        last = stages[RERANK] = _rerank(client, query, last)
    ranks = {name: _ranks(hits) for name, hits in stages.items()}
    return [
        Found(hit.id, hit.payload, {name: of[hit.id] for name, of in ranks.items() if hit.id in of})
        for hit in last[: depths.limit]
    ]


def _embed(
    client: Client, store: Store, query: str, layout: Layout, *, with_colbert: bool
) -> Vectors:
    """The question in the vectors that the collection has, and in their type."""
    options: EmbedOptions = {
        "return_dense": DENSE in layout.kinds,
        "return_sparse": SPARSE in layout.kinds,
        "return_colbert": with_colbert and COLBERT in layout.kinds,
        "output_dtype": layout.datatype or "float32",
    }
    answer = client.embed_query(query, **options)
    _check_model(store, answer.dense_model_name)
    return Vectors(
        None if answer.dense is None else answer.dense[0],
        None if answer.sparse is None else answer.sparse[0],
        None if answer.colbert is None else answer.colbert[0],
    )


def _check_model(store: Store, served: str) -> None:
    """Raise `QdrantError` if the collection has vectors of another model than the served one."""
    stored = (store.any_payload() or {}).get(MODEL, served)
    if stored != served:
        raise QdrantError(
            f"the collection has vectors of {stored}, and the service makes those of {served}: ask "
            "a service with the same model"
        )


def _rerank(client: Client, query: str, hits: Sequence[Hit]) -> list[Hit]:
    ranking = client.rerank(query, [str(hit.payload.get(TEXT, "")) for hit in hits])
    pairs = zip(ranking.indices.tolist(), ranking.scores.tolist(), strict=True)
    return [Hit(hits[i].id, score, hits[i].payload) for i, score in pairs]


def _ranks(hits: Sequence[Hit]) -> dict[str, Score]:
    return {hit.id: Score(hit.score, rank) for rank, hit in enumerate(hits, 1)}
