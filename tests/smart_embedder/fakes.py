"""Fake models, whose forwards a test can hold, fail and watch."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np

from app.settings import Settings
from smart_embedder.interface import (
    DefaultModels,
    DeviceInfo,
    LoadedModels,
    Measured,
    ModelInfo,
    PlacedModel,
    PlacedModels,
)
from smart_embedder.requests import CUT_AT_END, InputType, Outputs, TruncationOptions
from smart_embedder.results import SparseVector, TextEmbedding
from smart_embedder.tokens import TokenCount, TokenizedPair, TokenizedText
from tests.simulation.plain import PlainEmbedder, PlainModel

ALL = Outputs(dense=True, sparse=True, colbert=True)


class HeldDevice(PlainModel, ABC):
    """A model whose forward a test can hold at a gate, fail, and watch.

    With `asynchronous`, it computes while others are launched, as a GPU does.
    """

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.outputs: list[list[Outputs]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.held = False
        self.asynchronous = False
        self.failures: list[Exception | None] = []

    def launch(
        self, sequences: list[np.ndarray], outputs: list[Outputs]
    ) -> Callable[[], list[Any]]:
        self.batches.append([len(ids) for ids in sequences])
        self.outputs.append(outputs)
        self.entered.release()
        if self.asynchronous:
            return lambda: self.finish(sequences)
        results = self.finish(sequences)
        return lambda: results

    def finish(self, sequences: list[np.ndarray]) -> list[Any]:
        if self.held:
            self.gate.acquire()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return self.results(sequences)

    @abstractmethod
    def results(self, sequences: list[np.ndarray]) -> list[Any]:
        """Return the result of each sequence."""


class FakeModel(PlainEmbedder, HeldDevice):
    """An embedder: the tokens of a text are its characters, and its vector is their sum."""

    offset = 0.0

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        del input_type
        return [self._read(prompt + text, truncation) for text in texts]

    def _read(self, text: str, truncation: TruncationOptions) -> TokenizedText:
        kept = text[:100] if truncation.side == "right" else text[-100:]
        return TokenizedText(np.array([ord(c) for c in kept], np.int64), len(text))

    def colbert_tokens(self, ids: np.ndarray) -> np.ndarray:
        return ids[1:]

    def token_strings(self, ids: np.ndarray) -> list[str]:
        return [chr(token_id) for token_id in ids]

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        return [TextEmbedding(dense=np.float32([ids.sum() + self.offset])) for ids in sequences]


class FakeM3(FakeModel):
    """An embedder of all kinds: the weight and the ColBERT row of a token are its character."""

    name = "fake-m3"
    colbert_width = 1

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        return [
            TextEmbedding(
                np.float32([ids.sum(), *ids[:3]]) / np.float32(1 + ids.sum())
                if wanted.dense
                else None,
                SparseVector(np.unique(ids), np.unique(ids).astype(np.float32))
                if wanted.sparse
                else None,
                ids[1:, None].astype(np.float32) if wanted.colbert else None,
            )
            for ids, wanted in zip(sequences, self.outputs[-1], strict=True)
        ]


class FakeQwen(FakeM3):
    """An embedder with prompts, whose vectors can be shortened to two dimensions."""

    name = "fake-qwen"
    normalizes = False
    min_dimensions = 2
    prompts = MappingProxyType({"query": "find: ", "document": "", "code": "x = "})


class FakeReranker(HeldDevice):
    """A reranker: the score of a passage is its length."""

    always_normalizes = False
    temperature = 1.0
    reads_instruction = False
    offset = 0.0

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        return [
            TokenizedPair(
                np.ones(1 + len(text), np.int64),
                TokenCount(len(query), len(query)),
                TokenCount(len(text), len(text)),
            )
            for text in passages
        ]

    def results(self, sequences: list[np.ndarray]) -> list[float]:
        return [len(ids) - 1 + self.offset for ids in sequences]


def loaded(
    model: FakeModel, max_batch_tokens: int = 10, reranker: FakeReranker | None = None
) -> LoadedModels:
    """Loaded models on a CPU, or on a GPU if the model is asynchronous."""
    on_gpu = getattr(model, "asynchronous", False)
    device = DeviceInfo("cpu", "fake", "float32", "sdpa", gpu_available=on_gpu)
    return LoadedModels(model, (device,), max_batch_tokens, reranker=reranker)


def placed(
    models: Sequence[tuple[DeviceInfo, Any]],
    max_batch_tokens: int = 10,
    seconds_per_token: float = 0.0,
    info: ModelInfo | None = None,
) -> PlacedModels:
    """A model with a copy on each device."""
    measured = Measured(max_batch_tokens, seconds_per_token)
    copies = [
        PlacedModel(copy, device, lambda _: iter([None, measured]), lambda: None)
        for device, copy in models
    ]
    info = info or ModelInfo(copies[0].model.name, "float32", {})
    return PlacedModels(tuple(copies), lambda: info)


# A loader of no further models.
NO_MORE: Any = SimpleNamespace(prepare_thread=None)


def loading(
    models: LoadedModels, seconds_per_token: float = 0.0, loader: Any = NO_MORE
) -> Callable[[Settings], DefaultModels]:
    """Return a loader of these default models."""
    infos = {info.name: info for info in models.infos}

    def load(_: Settings) -> DefaultModels:
        def place(model: Any) -> PlacedModels:
            copies = [(device, model) for device in models.devices]
            return placed(copies, models.max_batch_tokens, seconds_per_token, infos.get(model.name))

        members = (models.embedder, models.dense, models.reranker)
        return DefaultModels(tuple(place(model) for model in members if model), loader)

    return load


def settings_of(models: LoadedModels, /, **settings: Any) -> Settings:
    """Return the settings with which these are the default models."""
    defaults = {} if models.reranker else {"reranker_model": "none"}
    defaults |= {"reranker_model": "late-interaction"} if models.late_interaction else {}
    defaults |= {"dense_embedding_model": "fake/dense"} if models.dense else {}
    return Settings(**defaults | settings)
