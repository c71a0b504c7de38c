"""Compares the bits of the results of a text or picture alone and in any batch.

Some inputs are embedded, and scored as passages, one by one. Then they are repeated in concurrent
requests of random size, kinds and class, and every byte is compared.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from smart_embedder.core import EngineCore
from smart_embedder.errors import RerankerDisabledError
from smart_embedder.requests import EmbedRequest, ImageInput, Outputs, RerankRequest
from smart_embedder.results import TextEmbedding
from tests.oracle.cases import draw_text, log_uniform

ALL = Outputs(dense=True, sparse=True, colbert=True)
QUERY = "which river is this"
_MOST_TEXTS = 32
_AT_ONCE = 24
# One in so many requests is a rerank.
_RERANK_EVERY = 5


def bytes_of(vectors: TextEmbedding) -> dict[str, bytes]:
    """Return the bytes of each kind of vectors."""
    found = {}
    if vectors.dense is not None:
        found["dense"] = vectors.dense.tobytes()
    if vectors.sparse is not None:
        found["sparse"] = vectors.sparse.indices.tobytes() + vectors.sparse.values.tobytes()
    if vectors.colbert is not None:
        found["colbert"] = vectors.colbert.tobytes()
    return found


def draw_texts(count: int, words: int) -> list[str]:
    """Draw different texts of at most this many words."""
    rng = random.Random(3)
    return list(dict.fromkeys(draw_text(rng, log_uniform(rng, words)) for _ in range(count)))


@dataclass
class Bits:
    """The bytes of each input alone, and the comparisons with them."""

    engine: EngineCore
    kinds: Outputs
    inputs: Sequence[str | ImageInput]
    alone: list[dict[str, bytes]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    answers: int = 0
    differing: dict[str, int] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    @classmethod
    async def measure(
        cls, engine: EngineCore, inputs: Sequence[str | ImageInput], answers: int
    ) -> "Bits":
        """Compare this many `answers` for the inputs, all of which the engine reads as passages."""
        found = cls(engine, engine.loaded().kinds, inputs)
        for item in inputs:
            result = await engine.embed(EmbedRequest([item], found.kinds))
            found.alone.append(bytes_of(result.embeddings[0]))
            try:
                ranked = await engine.rerank(RerankRequest(QUERY, [item]))
                found.scores += ranked.scores
            except RerankerDisabledError:
                pass
        await asyncio.gather(*(found.ask(answers) for _ in range(_AT_ONCE)))
        return found

    async def ask(self, answers: int) -> None:
        """Send one request after the other until this many answers were compared."""
        while self.answers < answers:
            chosen = self.rng.choices(range(len(self.inputs)), k=self.rng.randint(1, _MOST_TEXTS))
            inputs, bulk = [self.inputs[index] for index in chosen], self.rng.random() < 0.5
            client = f"client {self.rng.randint(0, 3)}"
            if self.scores and not self.rng.randrange(_RERANK_EVERY):
                ranking = RerankRequest(QUERY, inputs, is_bulk=bulk, client=client)
                ranked = await self.engine.rerank(ranking)
                for index, score in zip(chosen, ranked.scores, strict=True):
                    self._compare("score", score == self.scores[index])
                continue
            outputs = self.rng.choice([self.kinds, Outputs.of([self._kind()])])
            request = EmbedRequest(inputs, outputs, is_bulk=bulk, client=client)
            result = await self.engine.embed(request)
            for index, vectors in zip(chosen, result.embeddings, strict=True):
                for kind, found in bytes_of(vectors).items():
                    self._compare(kind, found == self.alone[index][kind])

    def _kind(self) -> str:
        return self.rng.choice([*self.alone[0]])

    def _compare(self, kind: str, equal: bool) -> None:
        self.answers += 1
        if not equal:
            self.differing[kind] = self.differing.get(kind, 0) + 1
