"""A text has the same bits alone and in any batch; scripts/oracle.py runs this for longer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smart_embedder.core import EngineCore
from smart_embedder.interface import ModelInfo
from smart_embedder.kernels import native
from smart_embedder.requests import ImageInput
from smart_embedder.settings import LATE_INTERACTION
from tests.oracle.bits import Bits, draw_texts
from tests.oracle.pictures import draw_urls
from tests.smart_embedder.engines import engine_on_cpu
from tests.support.encoders import dense, save_family, save_modules, word_tokenizer
from tests.support.pictures import save_image_text


def engine_of(embedder: Path, reranker: Path | str, dtype: str = "float32") -> EngineCore:
    settings = {"dtype": dtype, "max_batch_tokens": 1024}
    return engine_on_cpu(embedder, reranker_model=str(reranker), **settings)


async def assert_same_bits(*chosen: Any) -> ModelInfo:
    """Compare the bits of an engine's results, and return the information about its model."""
    async with engine_of(*chosen) as engine:
        assert all(status.info.reproducible for status in engine.statuses)
        info = engine.statuses[0].info
        found = await Bits.measure(engine, draw_texts(25, words=40), answers=600)
    assert (found.differing, found.answers >= 600) == ({}, True)
    return info


@pytest.fixture
def limited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Limit the kernels to an instruction set, and return its name."""
    known = {runnable.name: runnable for runnable in native.runnable_instruction_sets()}
    if request.param not in known:
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(native, "runnable_instruction_sets", lambda: [known[request.param]])
    native.load_library.cache_clear()
    yield request.param
    native.load_library.cache_clear()


@pytest.mark.parametrize(
    ("limited", "dtype"),
    [
        ("avx512_bf16", "bfloat16"),
        ("avx512_vnni", "int8"),
        ("avx2", "float32"),
        ("avx2", "int8"),
    ],
    indirect=["limited"],
)
async def test_same_bits_alone_and_in_any_batch(
    limited: str, dtype: str, tiny_m3: Path, tiny_reranker: Path
) -> None:
    info = await assert_same_bits(tiny_m3, tiny_reranker, dtype)
    assert (info.dtype, {*info.paths.values()}) == (dtype, {"native", "torch"})
    assert info.kernels.startswith(f"{limited}.")


async def test_same_bits_of_an_encoder_with_incomplete_panels(tmp_path: Path) -> None:
    """The inner layers have 96 columns, and a panel of the kernels has 64."""
    folder = tmp_path / "encoder"
    folder.mkdir()
    save_family(folder, "bert", word_tokenizer())
    save_modules(folder, further=[dense(48, "Tanh"), ("Normalize", {}, None)])
    await assert_same_bits(folder, LATE_INTERACTION)


async def test_same_bits_of_a_decoder(tiny_qwen: Path) -> None:
    await assert_same_bits(tiny_qwen, tiny_qwen)


async def test_same_bits_of_pictures_if_reproducible(tmp_path: Path) -> None:
    pictures = [ImageInput(url) for url in draw_urls(4, 15)]
    folder = save_image_text(tmp_path / "clip", "clip")
    inputs = [*draw_texts(5, words=40), *pictures]
    settings = {"reranker_model": LATE_INTERACTION, "reproducible": True}
    async with engine_on_cpu(folder, **settings) as engine:
        found = await Bits.measure(engine, inputs, answers=300)
    assert (found.differing, found.answers >= 300) == ({}, True)


async def test_different_bits_are_found(tiny_m3: Path, tiny_reranker: Path) -> None:
    async with engine_of(tiny_m3, tiny_reranker) as engine:
        found = await Bits.measure(engine, draw_texts(10, words=40), answers=0)
        found.alone[0]["dense"] = b"other"
        found.scores[1] += 1e-7
        await found.ask(500)
    assert {"dense", "score"} <= found.differing.keys()
