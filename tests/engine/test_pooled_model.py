"""How models are shown: their state, and what they make."""

from types import MappingProxyType

import pytest

from smart_embedder.engine.model import ModelInfo, PlacedModels
from smart_embedder.engine.pooled_model import (
    ModelState,
    PooledModel,
    abilities_of,
)
from smart_embedder.engine.records import Outputs
from smart_embedder.errors import MemoryTakenError, ModelNotLoadedError, ModelTooLargeError
from smart_embedder.settings.engine import ModelEntry
from tests.engine.fakes import FakeModel, FakeReranker, loaded, placed


def test_an_embedder_makes_its_kinds_and_reads_the_types_that_change_something() -> None:
    model = FakeModel()
    model.kinds = Outputs(dense=True, colbert=True)
    made = abilities_of(model, "embed")
    assert (made.kinds, made.input_types, made.max_length) == (("dense", "colbert"), (), 100)
    model.prompts = MappingProxyType({"passage": "p: "})
    assert abilities_of(model, "embed").input_types == ("document",)
    model.reads_input_type = True
    assert abilities_of(model, "embed").input_types == ("query", "document")


def test_a_reranker_makes_scores() -> None:
    made = abilities_of(FakeReranker(), "rerank")
    assert (made.kinds, made.input_types) == (("scores",), ())


def test_a_default_model_is_loading_until_it_is_there_or_has_failed() -> None:
    model = PooledModel(ModelEntry(name="one", pinned=True), is_default=True)
    assert (model.status.state, model.status.pinned) == (ModelState.LOADING, True)
    assert model.status.requests is None, "one that names no model has all default ones"
    model.fail(None)
    assert model.status.state is ModelState.FAILED
    model.succeed(resident(), 10)
    assert model.status.state is ModelState.READY


@pytest.fixture
def model() -> PooledModel:
    return PooledModel(ModelEntry(name="one"))


def resident() -> PlacedModels:
    fake = FakeModel()
    return placed([(loaded(fake).device, fake)], info=ModelInfo("fake", "int8", {}))


def test_a_model_is_shown_as_it_is_loaded_used_and_unloaded(model, ticking) -> None:
    assert (model.status.state, model.status.makes) == (ModelState.UNLOADED, None)
    model.begin()
    model.loading = "a task"
    assert model.state is ModelState.LOADING
    ticking.time += 7
    model.succeed(resident(), 10)
    assert model.load_seconds == 7
    model.leases = 2
    status = model.status
    assert (status.state, status.requests, status.load_seconds) == (ModelState.READY, 2, 7)
    assert (status.info.dtype, status.reason) == ("int8", None)
    assert status.makes.kinds == ("dense", "sparse", "colbert")
    model.gives_way = True
    assert model.leave() is not None
    model.loading = None
    assert (model.state, model.gives_way, model.leave()) == (ModelState.UNLOADED, False, None)
    model.succeed(resident(), 10)
    assert model.load_seconds == 7, "it began at the same time"


@pytest.mark.parametrize(
    ("error", "pause", "told", "states"),
    [
        (None, 30, 30, (ModelState.FAILED, ModelState.FAILED)),
        (ModelTooLargeError("too large"), 30, None, (ModelState.FAILED, ModelState.FAILED)),
        # It is loaded as soon as others have left enough.
        (MemoryTakenError("taken"), 10, 10, (ModelState.LOADING, ModelState.UNLOADED)),
    ],
)
def test_after_a_failure_requests_are_refused_for_a_pause(
    error, pause, told, states, model, ticking
) -> None:
    model.fail(error)
    assert isinstance(model.refusal, type(error or ModelNotLoadedError("")))
    assert model.refusal.retry_after == told
    assert model.state is states[0]
    assert model.status.reason == str(error or model.refusal)
    ticking.time += pause - 1
    assert model.refusal is not None
    assert model.refusal.retry_after == (None if told is None else 1)
    ticking.time += 1
    assert model.refusal is None
    assert model.state is states[1]
    model.succeed(resident(), 10)
    assert (model.status.reason, model.refusal) == (None, None)


def test_a_model_is_kept_for_those_who_were_told_to_come_back(model, ticking) -> None:
    model.promise(5)
    ticking.time += 5.9
    assert model.is_held
    ticking.time += 0.2
    assert not model.is_held
    model.leases = 1
    assert model.is_held
    model.gives_way = True
    assert not model.is_held, "new requests wait"
    model.users = 1
    assert model.is_held


def test_the_time_of_a_loading_is_known_by_its_size_or_the_last_one(model, ticking) -> None:
    assert (model.is_measured, model.seconds_left(100)) == (False, 10)
    model.needs = {"a": 150, "b": 50}
    assert (model.is_measured, model.nbytes, model.seconds_left(100)) == (True, 200, 2)
    model.begin()
    ticking.time += 1.5
    assert model.seconds_left(100) == 1, "at least"
    ticking.time += 6.5
    assert model.seconds_left(100) == 4
    model.succeed(resident(), 10)
    model.began = None
    assert model.seconds_left(100) == 8
