"""The device boundary, faked: a model whose forward a test can hold, fail and watch."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from smart_embedder.engine.model import DeviceInfo, LoadedModels
from smart_embedder.engine.records import (
    CUT_AT_END,
    InputType,
    Outputs,
    SparseVector,
    TextEmbedding,
    TokenizedPair,
    TokenizedText,
    TruncationOptions,
)
from smart_embedder.engine.space import VectorSpace

ALL = Outputs(dense=True, sparse=True, colbert=True)


class HeldDevice(ABC):
    """A forward that a test can hold at a gate, fail, and watch.

    An `asynchronous` one computes while others are launched, as a GPU does.
    """

    name = "fake"
    max_length = 100
    max_batch_sequences = None
    precision = "float32"
    reproducible = True
    spaces: Mapping[str, VectorSpace] = MappingProxyType({})

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
        """What the forward computes for each sequence."""


class FakeModel(HeldDevice):
    """A text's tokens are its characters; its vector is their sum."""

    colbert_width = 0
    kinds = Outputs(dense=True, sparse=True, colbert=True, states=True)
    normalizes = True
    dense_width = states_width = 4
    default_prompt = ""
    pooling = "mean"
    min_dimensions = None
    prompts: Mapping[str, str] = MappingProxyType({})
    reads_input_type = False

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
        return [TextEmbedding(dense=np.float32([ids.sum()])) for ids in sequences]


class FakeM3(FakeModel):
    """Makes all kinds: a token's weight is its character, and so is its row."""

    name = "fake-m3"
    colbert_width = 1

    def results(self, sequences: list[np.ndarray]) -> list[TextEmbedding]:
        return [
            TextEmbedding(
                dense=np.float32([ids.sum(), *ids[:3]]) / np.float32(1 + ids.sum()),
                sparse=SparseVector(np.unique(ids), np.unique(ids).astype(np.float32)),
                colbert=ids[1:, None].astype(np.float32),
            )
            for ids in sequences
        ]


class FakeQwen(FakeM3):
    """Can be cut to two dimensions, and has prompts."""

    name = "fake-qwen"
    normalizes = False
    min_dimensions = 2
    prompts = MappingProxyType({"query": "find: ", "document": "", "code": "x = "})


class FakeReranker(HeldDevice):
    """A pair's tokens are a one and the passage's characters; its score is the passage's length."""

    scores_are_logits = True
    reads_instruction = False
    refusal: str | None = None
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
                np.ones(1 + len(text), np.int64), len(query), len(query), len(text), len(text)
            )
            for text in passages
        ]

    def results(self, sequences: list[np.ndarray]) -> list[float]:
        return [len(ids) - 1 + self.offset for ids in sequences]


def loaded(
    model: FakeModel,
    max_batch_tokens: int = 10,
    reranker: FakeReranker | None = None,
    seconds_per_token: float = 0.0,
) -> LoadedModels:
    device = DeviceInfo(
        "cpu", "fake", "float32", "sdpa", gpu_available=getattr(model, "asynchronous", False)
    )
    return LoadedModels(
        embedder=model,
        device=device,
        max_batch_tokens=max_batch_tokens,
        reranker=reranker,
        seconds_per_token=seconds_per_token,
    )
