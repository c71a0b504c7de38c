"""The engine for other Python programs: `from smart_embedder import Engine`.

    engine = Engine("BAAI/bge-m3")
    await engine.start()
    vectors = await engine.embed(["What is hybrid search?"], sparse=True)
    await engine.stop()

It is the engine of the service, with the same queue, batches and fairness, but it returns arrays.
`SyncEngine` is the same for programs without an event loop.
"""

import asyncio
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from smart_embedder.core import EngineCore
from smart_embedder.requests import (
    NO_OPTIONS,
    EmbeddingOptions,
    EmbedRequest,
    FusionWeights,
    ImageInput,
    Outputs,
    RerankRequest,
)
from smart_embedder.results import FloatArray, Truncation
from smart_embedder.settings import NO_RERANKER, EngineSettings, explain
from smart_embedder.startup import load_models
from smart_embedder.surrogates import without_surrogates

Result = TypeVar("Result")

# The settings for each argument of m3serve's engine.
_M3SERVE_ARGUMENTS: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "model_name": lambda name: {"embedding_model": name},
    # `auto` computes in 16 bits if that is fast and exact enough on the device.
    "use_fp16": lambda use: {"dtype": "auto" if use else "float32"},
    "max_batch_size": lambda requests: {"max_requests_in_batch": requests},
    "batch_delay": lambda seconds: {"batch_wait_ms": 1000 * seconds},
    "max_length": lambda tokens: dict.fromkeys(
        ("bge_embed_max_length", "qwen_embed_max_length"), tokens
    ),
    "attn_implementation": lambda name: {"attention": name or "auto"},
}


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors of texts, in order; a kind that was not asked for is None.

    - `dense` is `[texts, width]` float32.
    - `sparse_weights[i]` float32 > 0 are the weights of text `i` for the token ids
      `sparse_indices[i]` int64, ascending.
    - `colbert[i]` is `[tokens - 1, colbert width]` float32.
    - `tokens` is the number of tokens of all texts, special tokens included.
    - `truncations` names the texts that were cut.
    - `replaced` are the indices of texts with lone surrogates, which were read as U+FFFD.
    """

    dense: FloatArray | None
    sparse_indices: list[npt.NDArray[np.int64]] | None
    sparse_weights: list[FloatArray] | None
    colbert: list[FloatArray] | None
    tokens: int
    truncations: list[Truncation]
    replaced: list[int] = field(default_factory=list)

    @property
    def colbert_vecs(self) -> list[FloatArray] | None:
        """The name of `colbert` in m3serve."""
        return self.colbert


class Engine:
    """A model on its devices; use it as `async with`, or between `start` and `stop`.

    `model` is a hub id or a folder. `dtype` and `device` are as DTYPE and DEVICE in
    docs/configuration.md, and so is every further setting of models, hardware, lengths, batches,
    cache and queue, in small letters, such as `max_batch_tokens=16384`. `reranker` is a hub id or a
    folder, `"late-interaction"` where `model` itself scores passages, or `"none"`. Neither .env nor
    the environment is read. The names that m3serve's engine has for them are known, too. Raises
    `ValueError` for a name that is no setting and for a value that is not allowed.
    """

    def __init__(
        self,
        model: str = "BAAI/bge-m3",
        *,
        dtype: str = "auto",
        device: str | None = "auto",
        reranker: str = NO_RERANKER,
        **settings: Any,
    ) -> None:
        chosen = {"embedding_model": model, "reranker_model": reranker}
        chosen |= {"dtype": dtype, "device": device or "auto"} | settings
        if chosen.pop("torch_compile", False):
            message = "torch_compile has no effect: the engine has kernels of its own"
            warnings.warn(message, stacklevel=2)
        for name in _M3SERVE_ARGUMENTS.keys() & settings.keys():
            for setting, value in _M3SERVE_ARGUMENTS[name](chosen.pop(name)).items():
                default = EngineSettings.model_fields[setting].default
                if chosen.setdefault(setting, default) not in (default, value):
                    raise ValueError(f"{name} contradicts {setting}: give one of them")
                chosen[setting] = value
        try:
            checked = EngineSettings.model_validate(chosen)
        except ValidationError as error:
            raise ValueError(explain(error)) from None
        self._engine = EngineCore(checked, load_models)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Load and warm the models. If that fails, end the threads and raise `StartupError`."""
        try:
            await self._engine.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Serve the accepted calls, then end the threads. An engine cannot be started again."""
        await self._engine.close()

    async def embed(
        self,
        texts: Sequence[str | ImageInput],
        *,
        dense: bool = True,
        sparse: bool = False,
        colbert: bool = False,
        options: EmbeddingOptions = NO_OPTIONS,
        client: str = "",
        return_sparse: bool = False,
        return_colbert: bool = False,
    ) -> Vectors:
        """Embed texts in one or more forwards, which other calls at the same time share.

        A picture among them is an `ImageInput`, if the model reads pictures.
        `client` names the client of the texts: clients share the device fairly. `return_sparse` and
        `return_colbert` are the names of `sparse` and `colbert` in m3serve. Raises the errors of
        `smart_embedder.core.EngineCore.embed`.
        """
        sparse, colbert = sparse or return_sparse, colbert or return_colbert
        values = {field.name: getattr(options, field.name) for field in fields(EmbeddingOptions)}
        cleaned = [without_surrogates(text) if isinstance(text, str) else text for text in texts]
        request = EmbedRequest(cleaned, Outputs(dense, sparse, colbert), client=client, **values)
        result = await self._engine.embed(request)
        embeddings = result.embeddings
        weights = [e.sparse for e in embeddings if e.sparse is not None]
        return Vectors(
            dense=np.stack([e.dense for e in embeddings if e.dense is not None]) if dense else None,
            sparse_indices=[vector.indices for vector in weights] if sparse else None,
            sparse_weights=[vector.values for vector in weights] if sparse else None,
            colbert=[e.colbert for e in embeddings if e.colbert is not None] if colbert else None,
            tokens=result.tokens,
            truncations=result.truncations,
            replaced=[i for i, text in enumerate(texts) if cleaned[i] is not text],
        )

    async def rerank(
        self,
        query: str,
        passages: Sequence[str],
        *,
        normalize: bool = False,
        weights: FusionWeights | None = None,
        client: str = "",
    ) -> FloatArray:
        """Score each passage for the query; returns `[passages]` float32, in order.

        `normalize` turns logits into probabilities, and `weights` are for late interaction. Raises
        the errors of `smart_embedder.core.EngineCore.rerank`.
        """
        weights = weights or FusionWeights()
        query, *passages = map(without_surrogates, (query, *passages))
        request = RerankRequest(
            query, passages, normalize=normalize, weights=weights, client=client
        )
        result = await self._engine.rerank(request)
        return np.array(result.scores, np.float32)


class SyncEngine:
    """`Engine` for programs without an event loop. Use it with `with`, or call `start` and `stop`.

    Any number of threads may call it at once, and their texts share forwards. Arguments, results
    and errors are those of `Engine`.
    """

    def __init__(self, model: str = "BAAI/bge-m3", **settings: Any) -> None:
        self._engine = Engine(model, **settings)
        self._loop = asyncio.new_event_loop()
        self._stopping = threading.RLock()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="smart-embedder", daemon=True
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the engine; see `Engine.start`."""
        self._thread.start()
        try:
            self._wait_for(self._engine.start())
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the engine, even while another thread starts it; a second call does nothing."""
        with self._stopping:
            if self._thread.is_alive():
                self._wait_for(self._engine.stop())
                self._wait_for(self._finish())
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()

    def embed(self, texts: Sequence[str | ImageInput], **options: Any) -> Vectors:
        """Embed texts; see `Engine.embed`."""
        return self._wait_for(self._engine.embed(texts, **options))

    def rerank(self, query: str, passages: Sequence[str], **options: Any) -> FloatArray:
        """Score passages; see `Engine.rerank`."""
        return self._wait_for(self._engine.rerank(query, passages, **options))

    def _wait_for(self, call: Coroutine[Any, Any, Result]) -> Result:
        if not self._thread.is_alive():
            call.close()
            raise RuntimeError("the engine is not started, or was stopped")
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except BaseException:  # Such as Ctrl+C: the result is not needed any more.
            future.cancel()
            raise

    async def _finish(self) -> None:
        """Wait until cancelled tasks, such as a start, have ended; then end the thread pool."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()
