"""A Ray actor with an engine, which embeds blocks one after another."""

import asyncio
import platform
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import orjson

from app.logs import configure_logs
from app.settings import Settings
from deploy.ray.blocks import Block, InputError, Row
from deploy.ray.outputs import (
    EmbeddedRow,
    Output,
    ParquetOutput,
    QdrantOutput,
    unfinished_name,
)
from smart_embedder.core import EngineCore
from smart_embedder.errors import SmartEmbedderError, UnavailableError
from smart_embedder.requests import EmbedRequest, Outputs
from smart_embedder.results import TextEmbedding
from smart_embedder.startup import load_models

Result = TypeVar("Result")

# While the device computes one batch, the engine tokenizes the next.
_BATCH_TEXTS = 256
_OPEN_BATCHES = 2
_VECTORS = "_vectors.json"


@dataclass(frozen=True, slots=True)
class Job:
    """The columns, the kinds of vectors and the output; `id_column` None: ids are locations."""

    settings: Settings
    text_column: str
    id_column: str | None
    outputs: Outputs
    folder: str
    qdrant: str | None = None
    collection: str = ""
    api_key: str | None = None

    def output(self) -> Output:
        """Return the output for the rows."""
        if self.qdrant is None:
            return ParquetOutput(Path(self.folder))
        return self.qdrant_output(self.qdrant)

    def qdrant_output(self, url: str) -> QdrantOutput:
        """Return the output to a Qdrant collection."""
        return QdrantOutput(Path(self.folder), url, self.collection, self.api_key)


class BlockEmbedder:
    """Embeds blocks; the engine is loaded when the actor starts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._output = job.output()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-loop", daemon=True
        )
        self._thread.start()
        self._engine = self._run(_start_engine(job.settings))
        self._check_vectors()
        self._permits = asyncio.Semaphore(_OPEN_BATCHES)

    def _check_vectors(self) -> None:
        """Raise `InputError` if this worker's vectors differ from those of the first worker.

        The first worker of a job stores its vector spaces and number formats. Weights may be
        replaced before a job is resumed, and DTYPE=auto depends on the processor.
        """
        file = Path(self._job.folder, _VECTORS)
        unfinished = unfinished_name(file)
        unfinished.write_bytes(orjson.dumps(self._vectors(), option=orjson.OPT_INDENT_2))
        with suppress(FileExistsError):
            file.hardlink_to(unfinished)
        unfinished.unlink()
        first = orjson.loads(file.read_bytes())
        differing = [
            f"{name}: {value}, was {first.get(name)}"
            for name, value in self._vectors().items()
            if first.get(name) != value
        ]
        if differing:
            raise InputError(
                f"on {platform.node()} the vectors are not those that the job began with "
                f"({'; '.join(differing)}): give every machine the same models and the same DTYPE, "
                "or choose another folder to start again"
            )

    def _vectors(self) -> dict[str, str]:
        """Return the vector space and the number format of each kind."""
        models, request = self._engine.loaded(), self._request([])
        spaces = {f"{kind} space": space for kind, space in models.space_ids(request).items()}
        makers = models.models_by_kind(request).items()
        return spaces | {f"{kind} dtype": models.get_dtype(model) for kind, model in makers}

    @property
    def widths(self) -> tuple[int, int]:
        """The widths of dense and of ColBERT vectors."""
        models = self._engine.loaded()
        return models.dense_model.dense_width, models.embedder.colbert_width

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Close the engine and stop its event loop."""
        if not self._loop.is_closed():
            self._engine.abort()
            self._run(self._engine.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __del__(self) -> None:
        """Close the engine when the actor ends."""
        self.close()

    def __call__(self, batch: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        """Embed blocks, and return the numbers of embedded and of failed rows of each."""
        counts = [self._embed_block(Block(**orjson.loads(block))) for block in batch["block"]]
        embedded, failed = zip(*counts, strict=True)
        return {"embedded": np.array(embedded), "failed": np.array(failed)}

    def _embed_block(self, block: Block) -> tuple[int, int]:
        rows = list(block.rows())
        if self._output.is_done(block.name):  # An earlier attempt ended before it reported.
            return len(rows), 0
        embedded = self._run(self._embed_rows(rows))
        self._output.write(block.name, embedded)
        failed = sum(row.vectors is None for row in embedded)
        return len(embedded) - failed, failed

    async def _embed_rows(self, rows: list[Row]) -> list[EmbeddedRow]:
        texts = [row.values.get(self._job.text_column) for row in rows]
        valid = [index for index, text in enumerate(texts) if isinstance(text, str)]
        batches = [valid[i : i + _BATCH_TEXTS] for i in range(0, len(valid), _BATCH_TEXTS)]
        results = await asyncio.gather(
            *(self._embed([str(texts[index]) for index in batch]) for batch in batches)
        )
        by_index = dict(zip(valid, chain.from_iterable(results), strict=True))
        return [self._make_row(row, by_index.get(index)) for index, row in enumerate(rows)]

    def _make_row(self, row: Row, result: TextEmbedding | SmartEmbedderError | None) -> EmbeddedRow:
        job, values = self._job, dict(row.values)
        text = values.pop(job.text_column, None)
        id_ = row.location if job.id_column is None else values.pop(job.id_column, row.location)
        if isinstance(result, TextEmbedding):
            return EmbeddedRow(str(id_), text, values, result)
        error = row.error or f"the column {job.text_column} holds no text"
        error = error if result is None else str(result)
        return EmbeddedRow(str(id_), text if isinstance(text, str) else None, values, None, error)

    def _request(self, texts: Sequence[str]) -> EmbedRequest:
        return EmbedRequest(
            list(texts), self._job.outputs, normalize_dense=True, input_type="document"
        )

    async def _embed(self, texts: Sequence[str]) -> list[TextEmbedding | SmartEmbedderError]:
        """Return the vectors of each text, or the error that the text causes."""
        try:
            async with self._permits:
                result = await self._engine.embed(self._request(texts))
        except UnavailableError:
            raise  # Not caused by a text: Ray tries the block again on another worker.
        except SmartEmbedderError as error:
            if len(texts) == 1:
                return [error]
            middle = len(texts) // 2
            return [*await self._embed(texts[:middle]), *await self._embed(texts[middle:])]
        return [*result.embeddings]


async def _start_engine(settings: Settings) -> EngineCore:
    configure_logs(settings.log_format, settings.log_level)
    engine = EngineCore(settings, load_models)
    await engine.start()
    return engine
