"""`Engine` and `SyncEngine` with a small real model."""

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import smart_embedder
from smart_embedder import Engine, SyncEngine
from smart_embedder import engine as library
from smart_embedder.core import EngineCore
from smart_embedder.errors import StartupError, TextTooLongError
from smart_embedder.interface import DefaultModels
from smart_embedder.requests import (
    EmbeddingOptions,
    EmbedRequest,
    RerankRequest,
    TruncationOptions,
)
from smart_embedder.settings import EngineSettings
from smart_embedder.startup import load_models
from tests.smart_embedder.fakes import ALL

TEXTS = ["a short text", "hybrid search with sparse and dense vectors", "one"]


@pytest.fixture(scope="module")
def sync_engine(tiny_m3: Path) -> Iterator[SyncEngine]:
    with SyncEngine(
        str(tiny_m3), dtype="float32", device="cpu", reranker="late-interaction"
    ) as engine:
        yield engine


async def test_arrays_equal_the_vectors_of_the_engine_core(tiny_m3: Path) -> None:
    settings = EngineSettings(
        embedding_model=str(tiny_m3),
        reranker_model="late-interaction",
        dtype="float32",
        device="cpu",
    )
    async with EngineCore(settings, load_models) as engine:
        expected = await engine.embed(EmbedRequest(TEXTS, ALL))
        scores = (await engine.rerank(RerankRequest(TEXTS[0], TEXTS))).scores
    library = Engine(str(tiny_m3), dtype="float32", device="cpu", reranker="late-interaction")
    await library.start()
    vectors = await library.embed(TEXTS, sparse=True, colbert=True)
    ranked = await library.rerank(TEXTS[0], TEXTS)
    await library.stop()

    assert vectors.dense.shape == (3, len(expected.embeddings[0].dense))
    for index, embedding in enumerate(expected.embeddings):
        np.testing.assert_array_equal(vectors.dense[index], embedding.dense)
        np.testing.assert_array_equal(vectors.sparse_indices[index], embedding.sparse.indices)
        np.testing.assert_array_equal(vectors.sparse_weights[index], embedding.sparse.values)
        np.testing.assert_array_equal(vectors.colbert[index], embedding.colbert)
    assert vectors.tokens == expected.tokens
    assert ranked.dtype == np.float32
    np.testing.assert_allclose(ranked, scores, rtol=1e-6)


def test_kinds_that_are_not_asked_for_are_none(sync_engine: SyncEngine) -> None:
    vectors = sync_engine.embed(TEXTS)
    assert vectors.dense is not None
    assert (vectors.sparse_indices, vectors.sparse_weights, vectors.colbert) == (None, None, None)
    assert sync_engine.embed(TEXTS, dense=False, sparse=True).dense is None


def test_truncations_are_returned_and_errors_raised(sync_engine: SyncEngine) -> None:
    long = ["word " * 9000]
    (cut,) = sync_engine.embed(long).truncations
    assert cut.original_tokens > cut.max_tokens
    with pytest.raises(TextTooLongError):
        sync_engine.embed(
            long, options=EmbeddingOptions(truncation=TruncationOptions(truncate=False))
        )


def test_a_failed_start_raises_its_reason_and_leaves_no_thread(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    with pytest.raises(StartupError, match="config.json"):
        SyncEngine(str(tmp_path), device="cpu").start()
    assert {*threading.enumerate()} <= before


def test_ctrl_c_during_the_start_ends_all_threads(
    tiny_m3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(settings: EngineSettings) -> DefaultModels:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return load_models(settings)

    monkeypatch.setattr(library, "load_models", interrupted)
    before = {*threading.enumerate()}
    with pytest.raises(KeyboardInterrupt):
        SyncEngine(str(tiny_m3), device="cpu").start()
    left = {thread.name for thread in {*threading.enumerate()} - before}
    assert not left & {"model-loader", "device-0", "smart-embedder"}


def test_an_engine_that_is_not_running_raises_an_error(tiny_m3: Path) -> None:
    engine = SyncEngine(str(tiny_m3), device="cpu")
    with pytest.raises(RuntimeError, match="not started"):
        engine.embed(TEXTS)
    engine.start()
    engine.stop()
    engine.stop()
    with pytest.raises(RuntimeError, match="was stopped"):
        engine.embed(TEXTS)


def test_arguments_of_m3serve_are_accepted(tiny_m3: Path, sync_engine, monkeypatch) -> None:
    given = []

    def make(settings, loader):
        given.append(settings)
        return EngineCore(settings, loader)

    monkeypatch.setattr(library, "EngineCore", make)
    engine = SyncEngine(
        model_name=str(tiny_m3),
        device=None,
        use_fp16=False,
        torch_compile=False,
        max_batch_size=256,
        batch_delay=0.005,
        tokenizer_threads=4,
        max_length=8,
        attn_implementation="sdpa",
    )
    with engine:
        result = engine.embed(["one " * 20, "two"], return_sparse=True, return_colbert=True)
    (settings,) = given
    assert (settings.embedding_model, settings.device) == (str(tiny_m3), "auto")
    assert (settings.dtype, settings.attention) == ("float32", "sdpa")
    assert (settings.max_requests_in_batch, settings.batch_wait_ms) == (256, 5)
    assert [cut.max_tokens for cut in result.truncations] == [8]
    expected = sync_engine.embed(["two"], sparse=True, colbert=True)
    np.testing.assert_allclose(result.dense[1], expected.dense[0], atol=1e-5)
    np.testing.assert_array_equal(result.sparse_indices[1], expected.sparse_indices[0])
    np.testing.assert_allclose(result.colbert_vecs[1], expected.colbert[0], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch": 3}, "there is no setting max_batch: the nearest is max_batch_tokens"),
        ({"trust_remote_code": True}, "there is no setting trust_remote_code: code of a model is"),
        ({"hf_token": "a"}, "there is no setting hf_token: it is the variable HF_TOKEN, in the"),
        ({"dtype": "half"}, "DTYPE=half is not allowed: auto, float16, "),
        ({"attn_implementation": "flash"}, "ATTENTION=flash is not allowed: "),
        ({"dtype": "float16", "use_fp16": False}, "use_fp16 contradicts dtype: give one of them"),
        (
            {"max_batch": 1, "max_queue_size": 0},
            "MAX_QUEUE_SIZE=0 is not allowed: a number of requests, at least 1; there is no",
        ),
    ],
)
def test_unknown_settings_and_values_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        Engine("BAAI/bge-m3", **arguments)


def test_torch_compile_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match="torch_compile has no effect"):
        Engine(torch_compile=True)


def test_importing_the_package_imports_no_submodule(tmp_path: Path) -> None:
    code = (
        "import sys, smart_embedder\n"
        "print(*[name for name in sys.modules if name.startswith('smart_embedder.')])\n"
        "assert smart_embedder.Engine and 'torch' not in sys.modules\n"
    )
    root = str(Path(smart_embedder.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True
    )
    assert done.stdout.split() == []
    with pytest.raises(AttributeError, match="no_such_name"):
        smart_embedder.no_such_name  # noqa: B018


def test_a_lone_surrogate_is_read_as_the_replacement_character(sync_engine: SyncEngine) -> None:
    kinds = {"sparse": True, "colbert": True}
    found = sync_engine.embed(["plain", "cut \ud83d", "\ud83d\ude00"], **kinds)
    expected = sync_engine.embed(["plain", "cut \ufffd", "\U0001f600"], **kinds)
    assert (found.replaced, expected.replaced) == ([1, 2], [])
    np.testing.assert_array_equal(found.dense, expected.dense)
    for kind in ("sparse_indices", "sparse_weights", "colbert"):
        for left, right in zip(getattr(found, kind), getattr(expected, kind), strict=True):
            np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(
        sync_engine.rerank("\ud83d", ["a\udc00"]), sync_engine.rerank("\ufffd", ["a\ufffd"])
    )
