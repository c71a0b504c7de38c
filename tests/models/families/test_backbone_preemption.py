"""A short forward between two layers of a long one changes no number of either."""

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from smart_embedder.engine.devices.thread import DeviceThread
from smart_embedder.engine.records import Outputs
from smart_embedder.models.families import backbone
from smart_embedder.models.families.backbone import Target
from smart_embedder.models.tasks.base import EmbeddingModel
from smart_embedder.models.tasks.dense import M3Embedder, load_dense_embedder
from tests.support.encoders import save_family, word_tokenizer


@pytest.fixture(params=["encoder", "decoder", "modernbert", "t5"])
def model(
    request, embedder: M3Embedder, tiny_qwen: Path, float32_target: Target, tmp_path: Path
) -> EmbeddingModel:
    if request.param == "encoder":
        return embedder
    folder = tiny_qwen
    if request.param != "decoder":
        folder = save_family(tmp_path / request.param, request.param, word_tokenizer())
    return load_dense_embedder("tiny", folder, 32_768, float32_target)


def dense(model: EmbeddingModel, sequences: list[np.ndarray]) -> np.ndarray:
    outputs = [Outputs(dense=True)] * len(sequences)
    return np.stack([each.dense for each in model.launch(sequences, outputs)()])


async def test_both_have_the_vectors_of_a_lonely_forward(model: EmbeddingModel) -> None:
    rng = np.random.default_rng(0)
    long = [rng.integers(5, 100, 200) for _ in range(8)]
    short = [rng.integers(5, 100, 7)]
    alone, alone_short = dense(model, long), dense(model, short)
    ended: list[str] = []
    both_wait = threading.Event()

    def run_long() -> np.ndarray:
        both_wait.wait()
        found = dense(model, long)
        ended.append("long")
        return found

    def run_short() -> np.ndarray:
        found = dense(model, short)
        ended.append("short")
        return found

    thread = DeviceThread("device")
    running = asyncio.create_task(thread.run(run_long))
    preempting = asyncio.create_task(thread.run(run_short, preempts=True))
    while len(thread._pending) < 2:  # noqa: ASYNC110 - turns, not time
        await asyncio.sleep(0)
    both_wait.set()
    np.testing.assert_array_equal(await running, alone)
    np.testing.assert_array_equal(await preempting, alone_short)
    assert ended == ["short", "long"]
    await thread.close(10)


def test_the_long_forward_goes_on_with_its_own_number_of_threads(monkeypatch) -> None:
    def run_with_fewer_threads() -> bool:
        torch.set_num_threads(1)
        return True

    threads = torch.get_num_threads()
    monkeypatch.setattr(backbone, "run_preempting_call", run_with_fewer_threads)
    try:
        torch.set_num_threads(2)
        backbone.preemption_point()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("model", ["encoder", "decoder"], indirect=True)
def test_attention_over_a_long_text_stops_between_its_heads(
    model: EmbeddingModel, monkeypatch
) -> None:
    text = [np.random.default_rng(0).integers(5, 100, 300)]
    points = 0

    def count() -> bool:
        nonlocal points
        points += 1
        return False

    monkeypatch.setattr(backbone, "run_preempting_call", count)
    at_once, points_at_once = dense(model, text), points
    points = 0
    monkeypatch.setattr(backbone, "_SCORES_OF_A_CALL", 1)
    np.testing.assert_array_equal(dense(model, text), at_once)
    assert points > points_at_once
