"""One engine in a Ray actor, which embeds one block after the other."""

import asyncio
import platform
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
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

# So many that the next ones are tokenised while the device computes.
_TEXTS_AT_ONCE = 256
_VECTORS = "_vectors.json"
_IN_WORK = 2


@dataclass(frozen=True, slots=True)
class Job:
    """The columns, the kinds of vectors and the output; without `id_column` ids are places."""

    settings: Settings
    text_column: str
    id_column: str | None
    outputs: Outputs
    folder: str
    qdrant: str | None = None
    collection: str = ""
    api_key: str | None = None

    def output(self) -> Output:
        """The output of the rows."""
        if self.qdrant is None:
            return ParquetOutput(Path(self.folder))
        return self.qdrant_output(self.qdrant)

    def qdrant_output(self, url: str) -> QdrantOutput:
        """The output to a Qdrant collection."""
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
        self._require_the_vectors_of_the_job()
        self._places = asyncio.Semaphore(_IN_WORK)

    def _require_the_vectors_of_the_job(self) -> None:
        """Raise `InputError` where this worker's vectors would not be those of the others.

        The first worker of the job records what it computes. Weights may be replaced before a job
        is resumed, and with DTYPE=auto the number format depends on the processor.
        """
        file = Path(self._job.folder, _VECTORS)
        unfinished = unfinished_name(file)
        unfinished.write_bytes(orjson.dumps(self._vectors(), option=orjson.OPT_INDENT_2))
        with suppress(FileExistsError):
            file.hardlink_to(unfinished)
        unfinished.unlink()
        first = orjson.loads(file.read_bytes())
        differing = [
            f"{fact}: {value}, was {first.get(fact)}"
            for fact, value in self._vectors().items()
            if first.get(fact) != value
        ]
        if differing:
            raise InputError(
                f"on {platform.node()} the vectors are not those that the job began with "
                f"({'; '.join(differing)}): give every machine the same models and the same DTYPE, "
                "or choose another folder to begin anew"
            )

    def _vectors(self) -> dict[str, str]:
        """The space and the number format of each kind; not the kernels, which machines choose."""
        models, request = self._engine.loaded(), self._request([])
        spaces = {f"{kind} space": space for kind, space in models.spaces_of(request).items()}
        makers = models.made_by(request).items()
        return spaces | {f"{kind} dtype": models.dtype_of(model) for kind, model in makers}

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers in a dense vector, and in a ColBERT vector."""
        models = self._engine.loaded()
        return models.dense_model.dense_width, models.embedder.colbert_width

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """End the engine and its loop."""
        if not self._loop.is_closed():
            self._engine.abort()
            self._run(self._engine.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __del__(self) -> None:
        """End the engine with the actor."""
        self.close()

    def __call__(self, batch: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.int64]]:
        """The numbers of rows with vectors and of others, of each of the blocks in `batch`."""
        counts = [self._embed_block(Block(**orjson.loads(each))) for each in batch["block"]]
        embedded, failed = zip(*counts, strict=True)
        return {"embedded": np.array(embedded), "failed": np.array(failed)}

    def _embed_block(self, block: Block) -> tuple[int, int]:
        rows = list(block.rows())
        if self._output.is_done(block.name):  # By an earlier try that was not reported.
            return len(rows), 0
        made = self._run(self._embed_rows(rows))
        self._output.write(block.name, made)
        failed = sum(row.vectors is None for row in made)
        return len(made) - failed, failed

    async def _embed_rows(self, rows: list[Row]) -> list[EmbeddedRow]:
        texts = [row.values.get(self._job.text_column) for row in rows]
        good = [place for place, text in enumerate(texts) if isinstance(text, str)]
        parts = [good[i : i + _TEXTS_AT_ONCE] for i in range(0, len(good), _TEXTS_AT_ONCE)]
        results = await asyncio.gather(
            *(self._embed([str(texts[place]) for place in part]) for part in parts)
        )
        made = dict(zip(good, (each for part in results for each in part), strict=True))
        return [self._row(row, made.get(place)) for place, row in enumerate(rows)]

    def _row(self, row: Row, made: TextEmbedding | SmartEmbedderError | None) -> EmbeddedRow:
        job, values = self._job, dict(row.values)
        text = values.pop(job.text_column, None)
        name = row.place if job.id_column is None else values.pop(job.id_column, row.place)
        if isinstance(made, TextEmbedding):
            return EmbeddedRow(str(name), text, values, made)
        error = row.error or f"the column {job.text_column} holds no text"
        error = error if made is None else str(made)
        return EmbeddedRow(str(name), text if isinstance(text, str) else None, values, None, error)

    def _request(self, texts: Sequence[str]) -> EmbedRequest:
        return EmbedRequest(
            list(texts), self._job.outputs, normalize_dense=True, input_type="document"
        )

    async def _embed(self, texts: Sequence[str]) -> list[TextEmbedding | SmartEmbedderError]:
        """The vectors of each text, or the error that this text has caused."""
        try:
            async with self._places:
                result = await self._engine.embed(self._request(texts))
        except UnavailableError:
            raise  # Not an error of a text: Ray tries the block again elsewhere.
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
