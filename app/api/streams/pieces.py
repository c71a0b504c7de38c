"""What is computed of a stream at a time: a piece of its lines, each with its result or error."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from app.api.errors import error_facts
from app.api.formats.answer import VectorOptions, vectors_of
from app.api.formats.records import Record
from app.api.handler import Service
from app.api.model_catalogue import ServedModel
from app.api.rendering import truncation_as_json
from app.api.streams.lines import Line
from app.engine.options import EmbeddingOptions
from app.engine.types import EmbeddingResult, Outputs, TextEmbedding, TokenStrings, Truncation
from app.errors import (
    InferenceTimeoutError,
    OutOfMemoryError,
    QueueFullError,
    SmartEmbedderError,
    UnavailableError,
)


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of one line: its vectors, or an error."""

    line: Line
    embedding: TextEmbedding | None = None
    tokens: TokenStrings | None = None
    truncations: tuple[Truncation, ...] = ()
    error: SmartEmbedderError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its vectors."""
        made = self.embedding
        if made is None:
            return 0
        sparse = () if made.sparse is None else (made.sparse.indices, made.sparse.values)
        return sum(each.nbytes for each in (made.dense, made.colbert, *sparse) if each is not None)

    def record(self, options: VectorOptions) -> Record:
        """What is answered; takes as long as the options make of vectors."""
        if self.error is not None or self.embedding is None:
            return Record(self.line.id, None, error=self._error())
        warnings = [
            truncation_as_json(replace(cut, index=self.line.number - 1), "text", "/text")
            for cut in self.truncations
        ]
        return Record(self.line.id, vectors_of(self.embedding, options, self.tokens), warnings)

    def _error(self) -> dict[str, Any]:
        error = self.error or SmartEmbedderError("there is no result")
        return error_facts(error) | {"line": self.line.number}


@dataclass(frozen=True, slots=True)
class Piece:
    """The results of consecutive lines, and how many tokens were read for them."""

    results: list[LineResult]
    tokens: int

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors."""
        return sum(result.nbytes for result in self.results)


class PieceEmbedder:
    """Embeds pieces of one stream, as far as places for streams are free.

    A full queue is waited for. An error that one text has caused is that text's alone: the texts
    are tried again in halves, down to one.
    """

    def __init__(
        self,
        service: Service,
        outputs: Outputs,
        options: EmbeddingOptions,
        *,
        normalize: bool,
        urgency: int,
        client: str,
        model: ServedModel | None = None,
    ) -> None:
        self._service = service
        self._places = service.stream_places
        self._outputs = outputs
        self._options = options
        self._normalize = normalize
        self._urgency = urgency
        self._client = client
        self._model = model

    async def embed(self, lines: Sequence[Line]) -> Piece:
        """The results of these lines; raises `UnavailableError` where the service cannot go on."""
        good = [line for line in lines if line.error is None]
        found, tokens = await self._results(good)
        made = {result.line.number: result for result in found}
        results = [made.get(line.number) or LineResult(line, error=line.error) for line in lines]
        return Piece(results, tokens)

    async def _results(self, lines: Sequence[Line]) -> tuple[list[LineResult], int]:
        if not lines:
            return [], 0
        try:
            result = await self._embed_when_possible([line.text for line in lines])
        except OutOfMemoryError as error:
            return await self._halves(lines, error)
        except UnavailableError:
            raise
        except InferenceTimeoutError as error:  # Halves would wait for the same device.
            return [LineResult(line, error=error) for line in lines], 0
        except SmartEmbedderError as error:
            return await self._halves(lines, error)
        self._service.metrics.sentences.inc(len(lines))
        return _of_lines(lines, result), result.tokens

    async def _halves(
        self, lines: Sequence[Line], error: SmartEmbedderError
    ) -> tuple[list[LineResult], int]:
        if len(lines) == 1:
            return [LineResult(lines[0], error=error)], 0
        middle = len(lines) // 2
        first, first_tokens = await self._results(lines[:middle])
        second, second_tokens = await self._results(lines[middle:])
        return first + second, first_tokens + second_tokens

    async def _embed_when_possible(self, texts: list[str]) -> EmbeddingResult:
        while True:
            try:
                return await self._embed(texts)
            except QueueFullError as error:
                pause = error.retry_after or 1
            await asyncio.sleep(pause)

    async def _embed(self, texts: list[str]) -> EmbeddingResult:
        outputs = self._outputs
        await self._places.acquire(self._client)
        try:
            return await self._service.engine.embed(
                texts,
                dense=outputs.dense,
                sparse=outputs.sparse,
                colbert=outputs.colbert,
                normalize_dense=self._normalize,
                options=self._options,
                urgency=self._urgency,
                client=self._client,
                embedder_only=self._model is not None and self._model.is_default_embedder,
                model=None if self._model is None else self._model.key,
            )
        finally:
            self._places.release(self._client)


def _of_lines(lines: Sequence[Line], result: EmbeddingResult) -> list[LineResult]:
    cuts: dict[int, list[Truncation]] = {}
    for cut in result.truncations:
        cuts.setdefault(cut.index, []).append(cut)
    strings = result.token_strings or repeat(None, len(lines))
    return [
        LineResult(line, made, tokens, tuple(cuts.get(i, ())))
        for i, (line, made, tokens) in enumerate(
            zip(lines, result.embeddings, strings, strict=True)
        )
    ]
