"""From settings to warm models: workers, single models beside others, and what is left of them."""

import asyncio
import gc
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smart_embedder.core import EngineCore
from smart_embedder.errors import StartupError
from smart_embedder.hardware import device as choose
from smart_embedder.hardware.cpu import available_threads
from smart_embedder.interface import Measured, PlacedModel
from smart_embedder.models.loader import EntryLoader
from smart_embedder.requests import EmbedRequest, Outputs
from smart_embedder.settings import EngineSettings, ModelEntry
from smart_embedder.startup import load_models
from tests.support.checkpoints import plain_corpus

SECOND_NODE = Path("/sys/devices/system/node/node1").exists()
TEXTS = ["hybrid search", "bread in the kitchen"]
EVERY_KIND = Outputs(dense=True, sparse=True, colbert=True)
LENGTHS = [" ".join(plain_corpus(lines=5))[: 20 * length] for length in range(1, 33)]
needs_two_cores = pytest.mark.skipif(available_threads() < 2, reason="one core cannot be shared")


def settings(folder: Path, *entries: ModelEntry, **changes: Any) -> EngineSettings:
    defaults = {"reranker_model": "none", "device": "cpu", "dtype": "float32", "models": entries}
    return EngineSettings(embedding_model=str(folder), **defaults | changes)


def placed(folder: Path, changes: dict[str, Any], **entry: Any) -> list[PlacedModel]:
    """A model as an entry of MODELS, on each of its devices."""
    loader = EntryLoader(settings(folder, **changes))
    return list(loader.plan(ModelEntry(name=str(folder), **entry)).load().models)


@needs_two_cores
async def test_two_workers_answer_as_one_does_on_cores_of_their_own(tiny_m3: Path) -> None:
    changes = {"reranker_model": "late-interaction", "max_batch_tokens": 64}

    async def embed_each(engine: EngineCore) -> list[Any]:
        """Every text as a request of its own, all at once."""
        requests = (EmbedRequest([text], EVERY_KIND) for text in LENGTHS)
        results = await asyncio.gather(*map(engine.embed, requests))
        return [result.embeddings[0] for result in results]

    async with EngineCore(settings(tiny_m3, **changes), load_models) as engine:
        expected = await embed_each(engine)
    both = settings(tiny_m3, device="cpu:0,cpu:1", **changes)
    async with EngineCore(both, load_models) as engine:
        found = await embed_each(engine)
        models, executors = engine.loaded(), engine._devices._executors
        assert [device.name for device in models.devices] == ["cpu:0", "cpu:1"]
        assert models.device.description.endswith("threads, shared by 2 workers")
        # On one memory node the weights are there once.
        if not SECOND_NODE:
            copies = [executor.models[models.embedder].runs for executor in executors]
            assert copies == [models.embedder] * 2
        if sys.platform == "linux":
            require_own_cores()
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one.dense, other.dense, atol=1e-6)
        np.testing.assert_allclose(one.colbert, other.colbert, atol=1e-6)
        np.testing.assert_array_equal(one.sparse.indices, other.sparse.indices)


def require_own_cores() -> None:
    """The threads of the workers share no CPU."""
    first, second = [
        os.sched_getaffinity(thread.native_id)
        for thread in threading.enumerate()
        if thread.name in {"device-0", "device-1"} and thread.native_id is not None
    ]
    assert not first & second
    assert first | second == os.sched_getaffinity(0)


@needs_two_cores
@pytest.mark.parametrize(
    ("device", "expected"),
    [(None, ["cpu:0", "cpu:1"]), ("cpu", ["cpu:0", "cpu:1"]), ("cpu:1", ["cpu:1"])],
)
def test_a_model_is_on_every_worker_or_on_those_that_it_names(
    tiny_m3: Path, device: str | None, expected: list[str]
) -> None:
    found = placed(tiny_m3, {"device": "cpu:0,cpu:1"}, device=device)
    assert [each.device.name for each in found] == expected


@needs_two_cores
def test_a_worker_that_there_is_none_of_is_told_with_its_line(tiny_m3: Path) -> None:
    with pytest.raises(StartupError, match=r"models.yaml, line 1: device=cpu:7 is none of DEVICE"):
        placed(tiny_m3, {"device": "cpu:0,cpu:1"}, device="cpu:7", location="models.yaml, line 1")


def test_what_a_model_needs_is_told_from_its_files(tiny_m3: Path) -> None:
    loader = EntryLoader(settings(tiny_m3))
    plan = loader.plan(ModelEntry(name=str(tiny_m3)))
    size = sum(path.stat().st_size for path in tiny_m3.glob("*.safetensors"))
    assert plan.needs.keys() == {"cpu"}
    assert 0.9 < plan.needs["cpu"] / size < 1.2
    half = loader.plan(ModelEntry(name=str(tiny_m3), dtype="bfloat16"))
    assert half.needs["cpu"] == pytest.approx(plan.needs["cpu"] / 2, abs=1)


def test_models_that_the_memory_has_no_room_for_stop_the_start(tiny_m3: Path, monkeypatch) -> None:
    monkeypatch.setattr(choose, "host_memory_left", lambda: 2**20)
    with pytest.raises(StartupError, match="no room for the models: .* and 1 MB are left"):
        load_models(settings(tiny_m3))


def test_what_an_entry_names_is_for_its_own_model_alone(tiny_qwen: Path) -> None:
    """POOLING, NORMALIZE and QUERY_PROMPT are for the default model of dense vectors."""
    changes = {"pooling": "cls", "normalize": True, "query_prompt": "theirs: "}
    (plain,) = placed(tiny_qwen, changes)
    named = {"pooling": "mean", "normalize": True, "query_prompt": "ours: ", "max_length": 7}
    (own,) = placed(tiny_qwen, changes, **named)
    assert (plain.model.pooling, plain.model.normalizes) == ("last_token", False)
    assert (own.model.pooling, own.model.normalizes, own.model.max_length) == ("mean", True, 7)
    assert own.model.prompts["query"] == "ours: " != plain.model.prompts["query"] != "theirs: "


def test_nothing_is_left_of_a_model_that_was_unloaded(tiny_qwen: Path) -> None:
    (model,) = placed(tiny_qwen, {})
    ids = [text.ids for text in model.model.tokenize(TEXTS)]
    assert len(model.model.forward(ids, Outputs(dense=True))) == len(TEXTS)
    left = weakref.ref(model.model)
    del model
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("thoroughly", [True, False])
@pytest.mark.parametrize("named", [None, 77])
def test_a_model_is_measured_by_itself_a_step_at_a_time_but_for_a_named_budget(
    tiny_m3: Path, named: int | None, *, thoroughly: bool
) -> None:
    (model,) = placed(tiny_m3, {} if named is None else {"max_batch_tokens": named})
    *steps, last = model.measure(thoroughly)
    assert len(steps) >= 3
    assert set(steps) == {None}
    assert isinstance(last, Measured)
    assert last.max_batch_tokens >= 512 if named is None else last.max_batch_tokens == named
    assert last.seconds_per_token > 0
