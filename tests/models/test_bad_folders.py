"""Folders that hold no model, or one with impossible numbers: one sentence, and no start.

None of them is computed with before that, or memory asked for that nobody has.
"""

import asyncio
import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, DistilBertConfig

from smart_embedder.errors import StartupError
from tests.engine.engines import engine_on_cpu
from tests.support.bad_start import failing_start
from tests.support.checkpoints import changed_weights
from tests.support.wordpiece import change

NAN = float("nan")
HUGE = 10**9


@pytest.fixture
def distilbert(tiny_m3: Path, tmp_path: Path) -> Path:
    """A model of transformers' own implementation."""
    folder = tmp_path / "distilbert"
    torch.manual_seed(0)
    vocabulary = json.loads((tiny_m3 / "config.json").read_text("utf-8"))["vocab_size"]
    config = DistilBertConfig(vocab_size=vocabulary, dim=32, n_layers=2, n_heads=2, hidden_dim=64)
    AutoModel.from_config(config).save_pretrained(folder)
    shutil.copy(tiny_m3 / "tokenizer.json", folder)
    return folder


def start(folder: Path) -> None:
    async def start_and_end() -> None:
        engine = engine_on_cpu(folder)
        try:
            await engine.start()
        finally:
            await engine.close()

    asyncio.run(start_and_end())


# What a number may be is shown in checkpoint/test_config.
IMPOSSIBLE = [
    ("tiny_m3", key, value)
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    for value in (0, HUGE, NAN, "64")
]
IMPOSSIBLE += [("tiny_m3", "layer_norm_eps", value) for value in (-1e-5, NAN)]
IMPOSSIBLE += [
    ("tiny_m3", "max_position_embeddings", 10**30),
    ("tiny_m3", "type_vocab_size", HUGE),
    ("tiny_m3", "pad_token_id", HUGE),
]
IMPOSSIBLE += [
    ("tiny_qwen", key, value)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
    for value in (0, HUGE, NAN, True)
]
IMPOSSIBLE += [
    ("tiny_qwen", "rms_norm_eps", NAN),
    ("tiny_qwen", "rope_parameters", {"rope_theta": NAN}),
    ("tiny_qwen", "vocab_size", HUGE),
]


@pytest.mark.parametrize(("checkpoint", "key", "value"), IMPOSSIBLE)
def test_impossible_numbers_of_an_encoder_or_a_decoder(
    checkpoint: str, key: str, value: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = shutil.copytree(request.getfixturevalue(checkpoint), tmp_path / "model")
    change(folder / "config.json", **{key: value})
    with pytest.raises(StartupError) as caught:
        start(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dim", HUGE), ("hidden_dim", HUGE), ("vocab_size", HUGE), ("n_layers", HUGE), ("dim", "a")],
)
def test_impossible_numbers_of_a_model_of_transformers(
    key: str, value: Any, distilbert: Path
) -> None:
    change(distilbert / "config.json", **{key: value})
    tracemalloc.start()
    try:
        with pytest.raises(StartupError):
            start(distilbert)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["tiny_m3", "distilbert"])
def test_weights_that_are_no_numbers(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "model")
    with changed_weights(folder) as weights:
        for each in weights.values():
            each.fill_(NAN)
    with pytest.raises(StartupError, match="computes nothing but numbers that are not finite"):
        start(folder)


def test_the_start_ends_with_a_sentence(tiny_m3: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_m3, tmp_path / "model")
    (folder / "config.json").write_text('{"a":' * 100_000, "utf-8")
    failing_start(tmp_path, folder, "config.json cannot be read: it is nested too deeply")
