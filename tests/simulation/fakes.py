"""Fake devices whose forwards may fail, and fake models whose results identify their texts.

A text is its number, padded to as many characters as it has tokens. Its vectors contain the number
of the text, the number of the model and the kind, so that all are different.
"""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import numpy as np

from smart_embedder.errors import InferenceError, StartupError
from smart_embedder.interface import (
    DefaultModels,
    DeviceInfo,
    LoadPlan,
    Measured,
    MemoryUsage,
    ModelInfo,
    PlacedModel,
    PlacedModels,
)
from smart_embedder.interrupts import stop_if_given_up
from smart_embedder.requests import CUT_AT_END, InputType, Outputs, TruncationOptions
from smart_embedder.results import SparseVector, TextEmbedding
from smart_embedder.settings import EngineSettings, ModelEntry
from smart_embedder.tokens import JoinedIds, TokenCount, TokenIds, TokenizedPair, TokenizedText
from tests.simulation.plain import AcceleratorError, PlainEmbedder, PlainModel
from tests.simulation.virtual_time import Effect, Moments

GIGABYTE = 10**9
MOST_TOKENS = 4096
# The next forward after one that ran out of memory is overdue so many times as often.
_TIMES_OVERDUE_WITHOUT_MEMORY = 30
_NOT_FINITE = "a number is not finite"


# The errors that forwards with a fault raise.
_RAISED: dict[str | None, Callable[[], Exception]] = {
    "memory": partial(MemoryError, "out of memory"),
    "raises": partial(RuntimeError, "the forward failed"),
    "lasting": partial(AcceleratorError, 220),
    "crash": partial(AcceleratorError, 700),
    "passing": partial(AcceleratorError, 701),
}


@dataclass(slots=True)
class Chances:
    """The probability of each fault of a forward; `calm` sets all to 0."""

    raises: float = 0.0
    not_finite: float = 0.0
    long: float = 0.0
    overdue: float = 0.0
    never: float = 0.0
    thread_dies: float = 0.0
    passing: float = 0.0
    lasting: float = 0.0
    crash: float = 0.0
    load_fails: float = 0.0

    def calm(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0.0)


@dataclass(slots=True, eq=False)
class Forward:
    """A forward on a device, from `began` to `ends`, and its fault."""

    device: "FakeDevice"
    model: "FakeModel"
    sequences: list[TokenIds]
    tokens: int
    began: float
    ends: float
    fault: str | None = None


@dataclass(eq=False)
class FakeDevice:
    """A device: its speed, its memory in tokens, and its faults."""

    name: str
    on_gpu: bool
    tokens_per_second: float
    fixed_seconds: float
    capacity: int
    random: Random
    chances: Chances
    now: Callable[[], float]
    effects: list[Effect]
    launched: Callable[[Forward], None]
    patience: float
    moments: Moments
    free_at: float = 0.0
    broken: str | None = None
    _outer: Forward | None = None
    _ran_out: bool = False

    def compute(
        self, model: "FakeModel", sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], Sequence[Any]]:
        """Launch a forward; decide its seconds and its fault."""
        now, tokens = self.now(), sum(map(len, sequences))
        fault = self._fault(tokens)
        self._ran_out = fault == "memory"
        seconds = self.fixed_seconds + tokens / self.tokens_per_second
        seconds *= 0.8 + 0.4 * self.random.random()
        if fault == "long":
            seconds *= self.random.randint(3, 10)
        elif fault == "overdue":
            seconds += self.patience * self.random.choice([0.9, 1.5, 1.9, 2.5, 4.0])
        elif fault == "never":
            seconds = float("inf")
        elif fault in {"memory", "raises"}:
            seconds *= self.random.random()
        seconds = self.moments.rounded(seconds)
        begins = max(now, self.free_at) if self.on_gpu else now
        if fault != "thread_dies":  # Before anything has reached the device.
            self.free_at = begins + seconds
        forward = Forward(self, model, sequences, tokens, begins, begins + seconds, fault)
        if not self.on_gpu:
            self._put_within_another(forward)
        self.launched(forward)
        collect = partial(self._collect, forward, model, sequences, outputs)
        if self.on_gpu:
            launch = 0.0 if self.moments.are_common else 0.0002
            self.effects.append(Effect(launch, death=fault == "thread_dies"))
            return collect
        common = self.moments.are_common
        parts = self.random.choice([1, 8, 16]) if common else self.random.randint(1, 24)
        self.effects.append(Effect(seconds, parts, fault == "thread_dies"))
        return collect

    def _put_within_another(self, forward: Forward) -> None:
        """On a CPU, add the seconds of a preempting forward to the preempted one."""
        outer = self._outer
        # The end of a preempted forward is a sum, and the next one may begin just before it.
        if outer is None or outer.ends <= forward.began + 1e-6:
            self._outer = forward
            return
        outer.ends += forward.ends - forward.began
        if forward.fault == "thread_dies":  # The preempted forward dies too.
            outer.fault, outer.ends, self._outer = forward.fault, forward.ends, None

    def _fault(self, tokens: int) -> str | None:
        if self.broken is not None:
            return self.broken
        if tokens > self.capacity:
            return "memory"
        draw = self.random.random()
        for name in self.chances.__slots__:
            chance: float = getattr(self.chances, name)
            if name == "overdue" and self._ran_out:
                chance *= _TIMES_OVERDUE_WITHOUT_MEMORY
            if draw < chance:
                if name in {"lasting", "crash"}:
                    self.broken = "lasting" if name == "lasting" else "crash"
                return name if name != "load_fails" else None
            draw -= chance
        return None

    def _collect(
        self,
        forward: Forward,
        model: "FakeModel",
        sequences: list[TokenIds],
        outputs: Sequence[Outputs],
    ) -> Sequence[Any]:
        if self.on_gpu:
            self.effects.append(Effect(max(0.0, forward.ends - self.now())))
        if forward.fault in _RAISED:
            error = _RAISED[forward.fault]()
            raise error
        results = model.results(sequences, outputs)
        if forward.fault == "not_finite":
            results[self.random.randrange(len(results))] = InferenceError(_NOT_FINITE)
        return results

    def free_memory(self) -> None:
        """Do nothing: no memory is cached."""

    def info(self) -> DeviceInfo:
        return DeviceInfo(self.name, "fake", "float32", "sdpa", gpu_available=self.on_gpu)


class FakeModel(PlainModel):
    """The base of embedders and rerankers; `number` is the same on every device."""

    max_length = MOST_TOKENS
    special_tokens: tuple[list[Any], list[Any]] = ([], [])

    def __init__(self, name: str, number: int, device: FakeDevice) -> None:
        self.name = name
        self.number = number
        self.device = device

    def launch(
        self, sequences: list[TokenIds], outputs: Sequence[Outputs]
    ) -> Callable[[], Sequence[Any]]:
        return self.device.compute(self, sequences, outputs)

    def results(self, sequences: list[TokenIds], outputs: Sequence[Outputs]) -> list[Any]:
        raise NotImplementedError

    def token_spans(self, text: str) -> Iterator[Any]:
        raise NotImplementedError


def text_of(number: int, tokens: int) -> str:
    return str(number).ljust(tokens, "x")


def number_of(text: str) -> int:
    return int(text.rstrip("x"))


class FakeEmbedder(PlainEmbedder, FakeModel):
    """An embedder with three kinds of vectors."""

    kinds = Outputs(dense=True, sparse=True, colbert=True)
    colbert_width = 1
    normalizes = False

    def tokenize(
        self,
        texts: list[str],
        prompt: str = "",
        truncation: TruncationOptions = CUT_AT_END,
        input_type: InputType | None = None,
    ) -> list[TokenizedText]:
        """Implement `Embedder`: the first id is the number of the text."""
        stop_if_given_up()
        return [TokenizedText(ids_of(text, MOST_TOKENS), len(text)) for text in texts]

    def colbert_tokens(self, ids: TokenIds) -> TokenIds:
        return ids[1:]

    def token_strings(self, ids: TokenIds) -> list[str]:
        return [str(token_id) for token_id in ids]

    def results(self, sequences: list[TokenIds], outputs: Sequence[Outputs]) -> list[Any]:
        return [
            self.vectors(int(ids[0]), len(ids), wanted)
            for ids, wanted in zip(sequences, outputs, strict=True)
        ]

    def vectors(self, text: int, tokens: int, outputs: Outputs) -> TextEmbedding:
        return TextEmbedding(
            np.array([text, tokens, self.number, 1], np.float32) if outputs.dense else None,
            SparseVector(np.array([text]), np.array([self.number + 1], np.float32))
            if outputs.sparse
            else None,
            np.full((2, 1), text * 4 + self.number, np.float32) if outputs.colbert else None,
        )


def ids_of(text: str, most: int) -> TokenIds:
    """The ids of a text, cut to `most`: the number of the text, and then ones."""
    ids = np.ones(min(len(text), most), np.int64)
    ids[0] = number_of(text)
    return ids


class PairIds(JoinedIds):
    """Ids that are joined only once, so that the auditor can recognise the array."""

    __slots__ = ("joined",)

    def __init__(self, first: TokenIds, second: TokenIds) -> None:
        super().__init__(first, second)
        self.joined = super().join()

    def join(self) -> TokenIds:
        return self.joined


class FakeReranker(FakeModel):
    """A reranker that scores a pair by the numbers of both texts."""

    reads_instruction = False
    always_normalizes = False
    temperature = 1.0

    def tokenize_pairs(
        self,
        query: str,
        passages: list[str],
        instruction: str | None,
        truncation: TruncationOptions = CUT_AT_END,
    ) -> list[TokenizedPair]:
        """Implement `Reranker`: the pairs share the ids of the query."""
        stop_if_given_up()
        first = ids_of(query, MOST_TOKENS // 2)
        return [self._pair(query, first, passage) for passage in passages]

    def _pair(self, query: str, first: TokenIds, passage: str) -> TokenizedPair:
        second = ids_of(passage, MOST_TOKENS - len(first))
        counts = TokenCount(len(query), len(first)), TokenCount(len(passage), len(second))
        return TokenizedPair(PairIds(first, second), *counts)

    def results(self, sequences: list[TokenIds], outputs: Sequence[Outputs]) -> list[Any]:
        return [score_of(self.number, int(ids[0]), int(ids[1:].max())) for ids in sequences]


def score_of(model: int, query: int, passage: int) -> float:
    return float((query * 7919 + passage) * 8 + model)


@dataclass(eq=False)
class FakeMemory:
    """A memory with models; they use it as long as they are referenced."""

    total: int
    others: int = 0
    models: "weakref.WeakKeyDictionary[FakeModel, int]" = field(
        default_factory=weakref.WeakKeyDictionary
    )

    @property
    def own(self) -> int:
        return sum(self.models.values())


class FakeLoader:
    """Loads single models beside the default ones; a load may fail."""

    def __init__(
        self,
        memory: FakeMemory,
        devices: list[FakeDevice],
        sizes: Mapping[str, int],
        budgets: Mapping[str, int],
        placements: Mapping[str, list[FakeDevice]] | None = None,
    ) -> None:
        self.memory = memory
        self.budgets = budgets
        self._placements = placements or {}
        self._devices = devices
        self._sizes = sizes
        self._numbers = {name: number for number, name in enumerate(sizes, start=3)}
        self._random = devices[0].random

    def prepare_thread(self) -> None:
        """Implement `ModelLoader`."""

    def plan(self, entry: ModelEntry) -> LoadPlan:
        self._spend(0.01, 0.5)
        return LoadPlan({"memory": self._sizes[entry.name]}, partial(self._load, entry))

    def read_memory(self, name: str) -> MemoryUsage:
        own = self.memory.own
        return MemoryUsage(own + self.memory.others, self.memory.total, own)

    def free_memory(self) -> None:
        """Implement `ModelLoader`: collect reference cycles."""
        gc.collect()

    def number_of(self, name: str) -> int:
        return self._numbers[name]

    def _spend(self, least: float, most: float) -> None:
        self._devices[0].effects.append(Effect(self._random.uniform(least, most)))

    def _load(self, entry: ModelEntry) -> PlacedModels:
        self._spend(0.1, 8.0)
        if self._random.random() < self._devices[0].chances.load_fails:
            raise StartupError("the files of the model are gone")
        kind = FakeEmbedder if entry.task == "embed" else FakeReranker
        copies = []
        devices = self._placements.get(entry.name, self._devices)
        for device in devices:
            model = kind(entry.public_name, self._numbers[entry.name], device)
            self.memory.models[model] = self._sizes[entry.name] // len(devices)
            copies.append(
                PlacedModel(model, device.info(), self._measure(entry, device), device.free_memory)
            )
        info = ModelInfo(entry.public_name, "float32", {})
        return PlacedModels(tuple(copies), lambda: info)

    def _measure(
        self, entry: ModelEntry, device: FakeDevice
    ) -> Callable[[bool], Iterator[Measured | None]]:
        measured = Measured(self.budgets[entry.name], 1 / device.tokens_per_second)

        def steps(thoroughly: bool) -> Iterator[Measured | None]:
            device.effects.append(Effect(0.05))
            yield None
            device.effects.append(Effect(0.05))
            yield measured

        return steps


def default_models(
    settings: EngineSettings, devices: list[FakeDevice], budget: int, loader: FakeLoader
) -> DefaultModels:
    """The default models on every device: an embedder, and a reranker unless it is switched off."""

    def place(
        kind: Callable[[str, int, FakeDevice], FakeModel], name: str, number: int
    ) -> PlacedModels:
        def measure(device: FakeDevice, _thoroughly: bool) -> Iterator[Measured | None]:
            yield Measured(budget, 1 / device.tokens_per_second)

        copies = [
            PlacedModel(
                kind(name, number, device),
                device.info(),
                partial(measure, device),
                device.free_memory,
            )
            for device in devices
        ]
        return PlacedModels(tuple(copies), lambda: ModelInfo(name, "float32", {}))

    has_reranker = settings.reranker_model not in {"none", "late-interaction"}
    models = [place(FakeEmbedder, "embedder", 1)]
    if has_reranker:
        models.append(place(FakeReranker, "reranker", 2))
    return DefaultModels(tuple(models), loader)
