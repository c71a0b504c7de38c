"""What settings mean together: those that contradict each other, and what follows from several."""

from pathlib import Path

import pytest

from smart_embedder.errors import StartupError
from smart_embedder.settings import Settings
from smart_embedder.settings.sources import load_settings


@pytest.mark.parametrize("device", ["cpu", "cpu:0,cpu:1"])
def test_values_that_contradict_each_other_are_refused(monkeypatch, device: str) -> None:
    monkeypatch.setenv("DEVICE", device)
    monkeypatch.setenv("DTYPE", "float16")
    with pytest.raises(StartupError, match="DTYPE=float16 is for GPUs"):
        load_settings()


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_int8_with_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setenv("DEVICE", device)
    monkeypatch.setenv("DTYPE", "INT8")
    with pytest.raises(StartupError, match=f"DTYPE=int8 is for CPUs; with DEVICE={device} use"):
        load_settings()


def test_a_rerank_must_end_before_its_request(monkeypatch) -> None:
    monkeypatch.setenv("RERANK_GPU_TIMEOUT", "90")
    with pytest.raises(StartupError, match="RERANK_GPU_TIMEOUT=90 must be below REQUEST_TIMEOUT"):
        load_settings()


def test_the_newer_length_wins_over_the_older_name(monkeypatch) -> None:
    monkeypatch.setenv("MAX_INPUT_LENGTH", "512")
    assert load_settings().embed_max_length == 512
    monkeypatch.setenv("BGE_EMBED_MAX_LENGTH", "1024")
    assert load_settings().embed_max_length == 1024


def test_settings_of_a_program_come_from_it_alone(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PORT=9000\nDTYPE=float64\n")
    monkeypatch.setenv("MAX_QUEUE_SIZE", "none")
    settings = Settings(device="cpu")
    assert (settings.device, settings.port, settings.max_queue_size) == ("cpu", 8000, 200)


def test_a_name_that_is_no_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="max_queu_size"):
        Settings(max_queu_size=1)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("auto", "float16"),
        ("cuda", "float16"),
        ("mps", "bfloat16"),
        ("cpu", "int8"),
        ("auto", "int8"),
    ],
)
def test_a_number_format_may_be_named_with_a_device_that_has_it(device: str, dtype: str) -> None:
    settings = Settings(device=device, dtype=dtype)
    assert (settings.device, settings.dtype) == (device, dtype)


def test_a_rerank_may_take_all_but_the_last_of_its_request() -> None:
    assert Settings(rerank_gpu_timeout=89.9).rerank_gpu_timeout == 89.9
    with pytest.raises(ValueError, match=r"RERANK_GPU_TIMEOUT=90 must be below REQUEST_TIMEOUT=90"):
        Settings(rerank_gpu_timeout=90)


@pytest.mark.parametrize(
    ("reranker", "name"),
    [("late-interaction", "own/colbert"), ("none", "none"), ("own/reranker", "own/reranker")],
)
def test_a_late_interaction_is_scored_by_the_model_of_embeddings(reranker: str, name: str) -> None:
    settings = Settings(embedding_model="own/colbert", reranker_model=reranker)
    assert settings.reranker_name == name


def test_dense_vectors_are_of_the_model_for_them_or_else_of_the_one_for_all() -> None:
    assert Settings(embedding_model="own/m3").dense_model == "own/m3"
    assert Settings(embedding_model="own/m3", dense_embedding_model="a/b").dense_model == "a/b"


def test_devices_are_those_that_are_named_each_once_and_in_their_order() -> None:
    settings = Settings(device="cuda:1, cuda:0,cuda:1")
    assert settings.devices == ["cuda:1", "cuda:0"]


def test_each_process_counts_and_keeps_for_itself_unless_a_redis_is_named() -> None:
    address = "redis://:secret@localhost/1"
    alone = Settings(embedding_cache="memory", rate_limit_store="memory")
    shared = Settings(embedding_cache=address, rate_limit_store=address)
    assert (alone.shared_rate_limit_store, alone.shared_embedding_cache) == (None, None)
    assert (shared.shared_rate_limit_store, shared.shared_embedding_cache) == (address, address)
    assert alone.caches_embeddings
    assert shared.caches_embeddings
    assert not Settings().caches_embeddings
    assert Settings().shared_embedding_cache is None


def test_models_are_kept_below_the_folder_of_the_hub(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Settings(hf_home=Path("~/models")).hub_cache == tmp_path / "models" / "hub"
    nobody = Settings(hf_home=Path("~nobody-of-this-name/models"))
    with pytest.raises(StartupError, match=r"^HF_HOME=\S+ cannot be found: .* set HF_HOME"):
        _ = nobody.hub_cache
