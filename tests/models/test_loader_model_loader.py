"""Single models, loaded beside others: where they are, what they need, and what is left of them."""

import asyncio
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest

from smart_embedder.engine import Engine
from smart_embedder.engine.model import Measured, MemoryUsage
from smart_embedder.errors import StartupError
from smart_embedder.models.device.cpu import available_threads
from smart_embedder.models.load import load_models
from smart_embedder.models.loader import EntryLoader
from smart_embedder.observability.metrics import Metrics
from smart_embedder.settings import Settings
from smart_embedder.settings.types import ModelEntry

TEXTS = ["hybrid search", "bread in the kitchen"]
needs_two_cores = pytest.mark.skipif(available_threads() < 2, reason="one core cannot be shared")


def settings(folder: Path, *entries: ModelEntry, device: str = "cpu") -> Settings:
    return Settings(
        embedding_model=str(folder),
        reranker_model="none",
        device=device,
        dtype="float32",
        models=entries,
    )


def device_names(folder: Path, device: str, of_entry: str | None) -> list[str]:
    entry = ModelEntry(name=str(folder), device=of_entry, location="models.yaml, line 1")
    loader = EntryLoader(settings(folder, device=device))
    placed = loader.plan(entry).load()
    return [each.device.name for each in placed.models]


@needs_two_cores
@pytest.mark.parametrize(
    ("of_entry", "expected"),
    [
        (None, ["cpu:0", "cpu:1"]),
        ("cpu", ["cpu:0", "cpu:1"]),
        ("cpu:1", ["cpu:1"]),
    ],
)
def test_a_model_is_on_every_worker_or_on_those_that_it_names(
    tiny_m3: Path, of_entry: str | None, expected: list[str]
) -> None:
    assert device_names(tiny_m3, "cpu:0,cpu:1", of_entry) == expected


@needs_two_cores
def test_a_worker_that_there_is_none_of_is_told_with_its_line(tiny_m3: Path) -> None:
    with pytest.raises(StartupError, match=r"models.yaml, line 1: device=cpu:7 is none of DEVICE"):
        device_names(tiny_m3, "cpu:0,cpu:1", "cpu:7")


def test_what_a_model_needs_is_told_from_its_files(tiny_m3: Path) -> None:
    plan = EntryLoader(settings(tiny_m3)).plan(ModelEntry(name=str(tiny_m3)))
    size = sum(path.stat().st_size for path in tiny_m3.glob("*.safetensors"))
    assert plan.needs.keys() == {"cpu"}
    assert 0.9 < plan.needs["cpu"] / size < 1.2
    half = EntryLoader(settings(tiny_m3)).plan(ModelEntry(name=str(tiny_m3), dtype="bfloat16"))
    assert half.needs["cpu"] == pytest.approx(plan.needs["cpu"] / 2, abs=1)


def test_a_models_own_length_is_its_limit(tiny_m3: Path) -> None:
    plan = EntryLoader(settings(tiny_m3)).plan(ModelEntry(name=str(tiny_m3), max_length=7))
    assert plan.load().models[0].model.max_length == 7


async def embed(engine: Engine, model: str | None = None) -> np.ndarray:
    result = await engine.embed(TEXTS, dense=True, sparse=False, colbert=False, model=model)
    return np.array([each.dense for each in result.embeddings])


@needs_two_cores
async def test_nothing_is_left_of_a_model_that_was_unloaded(
    tiny_m3: Path, tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smart_embedder.engine.model_pool.PAUSE", 0)
    async with Engine(settings(tiny_qwen), load_models) as engine:
        expected = await embed(engine)
    further = ModelEntry(name=str(tiny_qwen))
    metrics = Metrics()
    async with Engine(
        settings(tiny_m3, further, device="cpu:0,cpu:1"), load_models, metrics
    ) as engine:
        both = asyncio.gather(*(embed(engine, further.public_name) for _ in range(8)))
        for found in await both:
            np.testing.assert_allclose(found, expected, atol=1e-6)
        models = engine.loaded(further.public_name)
        assert models is not None
        left = weakref.ref(models.embedder)
        del models, both

        def short(_: EntryLoader, name: str) -> MemoryUsage:
            return MemoryUsage(used=10 if left() is not None else 0, total=10)

        monkeypatch.setattr(EntryLoader, "read_memory", short)
        name = further.public_name
        while not metrics.value("embedder_model_unloads_total", model=name):
            await embed(engine)
        gc.collect()
        assert left() is None
        monkeypatch.setattr(EntryLoader, "read_memory", lambda *_: MemoryUsage(0, 10**12))
        np.testing.assert_allclose(await embed(engine, further.public_name), expected, atol=1e-6)


def test_a_models_own_pooling_is_its_own_alone(tiny_qwen: Path) -> None:
    """POOLING is for the default model of dense vectors."""
    all_settings = settings(tiny_qwen).model_copy(update={"pooling": "cls"})
    loader = EntryLoader(all_settings)
    poolings = [
        loader.plan(ModelEntry(name=str(tiny_qwen), pooling=pooling)).load().models[0].model.pooling
        for pooling in (None, "mean")
    ]
    assert poolings == ["last_token", "mean"]


def test_a_models_own_prompts_and_scaling_are_its_own_alone(tiny_qwen: Path) -> None:
    """QUERY_PROMPT and NORMALIZE are for the default model of dense vectors."""
    update = {"normalize": True, "query_prompt": "theirs: "}
    loader = EntryLoader(settings(tiny_qwen).model_copy(update=update))
    plain, own = [
        loader.plan(entry).load().models[0].model
        for entry in (
            ModelEntry(name=str(tiny_qwen)),
            ModelEntry(name=str(tiny_qwen), normalize=True, query_prompt="ours: "),
        )
    ]
    assert (plain.normalizes, own.normalizes) == (False, True)
    assert own.prompts["query"] == "ours: " != plain.prompts["query"] != "theirs: "


def measured(folder: Path, *, thoroughly: bool, **changed: int) -> list[Measured | None]:
    """What each step of the measurement of a model yields."""
    loader = EntryLoader(settings(folder).model_copy(update=changed))
    (placed_model,) = loader.plan(ModelEntry(name=str(folder))).load().models
    return list(placed_model.measure(thoroughly))


@pytest.mark.parametrize("thoroughly", [True, False])
def test_a_model_is_measured_by_itself_a_step_at_a_time(tiny_m3: Path, *, thoroughly: bool) -> None:
    *steps, last = measured(tiny_m3, thoroughly=thoroughly)
    assert len(steps) >= 3
    assert set(steps) == {None}
    assert last is not None
    assert last.max_batch_tokens >= 512
    assert last.seconds_per_token > 0


@pytest.mark.parametrize("thoroughly", [True, False])
def test_a_token_budget_that_is_named_is_that_of_every_model(
    tiny_m3: Path, *, thoroughly: bool
) -> None:
    last = measured(tiny_m3, thoroughly=thoroughly, max_batch_tokens=77)[-1]
    assert last is not None
    assert last.max_batch_tokens == 77
