"""Loading models: workers, entries of MODELS, needs of memory, unloading."""

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
from smart_embedder.hardware import device as hardware
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
    """Load a model as an entry of MODELS, on each of its devices."""
    loader = EntryLoader(settings(folder, **changes))
    return list(loader.plan(ModelEntry(name=str(folder), **entry)).load().models)


@needs_two_cores
async def test_two_workers_give_the_same_vectors_on_separate_cores(tiny_m3: Path) -> None:
    changes = {"reranker_model": "late-interaction", "max_batch_tokens": 64}

    async def embed_each(engine: EngineCore) -> list[Any]:
        """Send one request for each text, all at once."""
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
        # Workers on one memory node share the weights.
        if not SECOND_NODE:
            copies = [executor.models[models.embedder].replica for executor in executors]
            assert copies == [models.embedder] * 2
        if sys.platform == "linux":
            assert_separate_cores()
    for single, shared in zip(expected, found, strict=True):
        np.testing.assert_allclose(single.dense, shared.dense, atol=1e-6)
        np.testing.assert_allclose(single.colbert, shared.colbert, atol=1e-6)
        np.testing.assert_array_equal(single.sparse.indices, shared.sparse.indices)


def assert_separate_cores() -> None:
    """The threads of the workers share no core, and use all."""
    first, second = [
        os.sched_getaffinity(thread.native_id)
        for thread in threading.enumerate()
        if thread.name in {"device-0", "device-1"} and thread.native_id is not None
    ]
    assert not first & second
    assert first | second == os.sched_getaffinity(0)


@needs_two_cores
def test_model_runs_on_every_worker_or_on_its_named_devices(tiny_m3: Path) -> None:
    both = {"device": "cpu:0,cpu:1"}
    for device, expected in ((None, ["cpu:0", "cpu:1"]), ("cpu:1", ["cpu:1"])):
        found = placed(tiny_m3, both, device=device)
        assert [copy.device.name for copy in found] == expected
    with pytest.raises(StartupError, match=r"models.yaml, line 1: device=cpu:7 is none of DEVICE"):
        placed(tiny_m3, both, device="cpu:7", location="models.yaml, line 1")


def test_memory_needs_are_computed_from_the_files(tiny_m3: Path) -> None:
    loader = EntryLoader(settings(tiny_m3))
    plan = loader.plan(ModelEntry(name=str(tiny_m3)))
    size = sum(path.stat().st_size for path in tiny_m3.glob("*.safetensors"))
    assert plan.needs.keys() == {"cpu"}
    assert 0.9 < plan.needs["cpu"] / size < 1.2
    half = loader.plan(ModelEntry(name=str(tiny_m3), dtype="bfloat16"))
    assert half.needs["cpu"] == pytest.approx(plan.needs["cpu"] / 2, abs=1)


def test_too_little_memory_for_the_models_stops_the_start(tiny_m3: Path, monkeypatch) -> None:
    monkeypatch.setattr(hardware, "host_memory_left", lambda: 2**20)
    with pytest.raises(StartupError, match="no room for the models: .* and 1 MB are left"):
        load_models(settings(tiny_m3))


def test_overrides_of_an_entry_apply_only_to_its_model(tiny_qwen: Path) -> None:
    """POOLING, NORMALIZE and QUERY_PROMPT are for the default model of dense vectors."""
    changes = {"pooling": "cls", "normalize": True, "query_prompt": "default: "}
    (plain,) = placed(tiny_qwen, changes)
    named = {"pooling": "mean", "normalize": True, "query_prompt": "entry: ", "max_length": 7}
    (changed,) = (copy.model for copy in placed(tiny_qwen, changes, **named))
    assert (plain.model.pooling, plain.model.normalizes) == ("last_token", False)
    assert (changed.pooling, changed.normalizes, changed.max_length) == ("mean", True, 7)
    assert changed.prompts["query"] == "entry: " != plain.model.prompts["query"] != "default: "


def test_unloaded_model_is_garbage_collected(tiny_qwen: Path) -> None:
    (model,) = placed(tiny_qwen, {})
    ids = [text.ids for text in model.model.tokenize(TEXTS)]
    assert len(model.model.forward(ids, Outputs(dense=True))) == len(TEXTS)
    reference = weakref.ref(model.model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(("named", "thoroughly"), [(None, True), (None, False), (77, True)])
def test_token_budget_is_measured_in_steps_unless_max_batch_tokens_is_set(
    tiny_m3: Path, named: int | None, *, thoroughly: bool
) -> None:
    (model,) = placed(tiny_m3, {} if named is None else {"max_batch_tokens": named})
    *steps, last = model.measure(thoroughly)
    assert len(steps) >= 3
    assert set(steps) == {None}
    assert isinstance(last, Measured)
    assert last.max_batch_tokens >= 512 if named is None else last.max_batch_tokens == named
    assert last.seconds_per_token > 0
