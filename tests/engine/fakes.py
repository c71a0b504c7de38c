"""The device boundary, faked: a model whose forward a test can hold, fail and watch."""

import threading

import numpy as np

from app.engine.loading import DeviceInfo, LoadedModels
from app.jobs import Outputs, TextEmbedding, TokenizedText


class FakeModel:
    """A text's tokens are its characters; its vector is their sum."""

    name = "fake"
    max_length = 100

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.outputs: list[Outputs] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.held = False
        self.failures: list[Exception] = []

    def tokenize(self, texts: list[str]) -> list[TokenizedText]:
        return [
            TokenizedText(np.array([ord(c) for c in text[:100]], np.int64), len(text))
            for text in texts
        ]

    def forward(self, sequences: list[np.ndarray], outputs: Outputs) -> list[TextEmbedding]:
        self.batches.append([len(ids) for ids in sequences])
        self.outputs.append(outputs)
        self.entered.release()
        if self.held:
            self.gate.acquire()
        if self.failures:
            raise self.failures.pop(0)
        return [TextEmbedding(dense=np.float32([ids.sum()])) for ids in sequences]


def loaded(model: FakeModel, max_batch_tokens: int = 10) -> LoadedModels:
    device = DeviceInfo("cpu", "fake", "float32", "sdpa")
    return LoadedModels(embedder=model, device=device, max_batch_tokens=max_batch_tokens)
