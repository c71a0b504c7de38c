"""Settings: defaults of the contract, and wrong values refused by name."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from smart_embedder.errors import StartupError
from smart_embedder.settings import Settings
from smart_embedder.settings.sources import load_settings

DEFAULTS = {
    "host": "127.0.0.1",
    "port": 8000,
    "embedding_model": "BAAI/bge-m3",
    "dense_embedding_model": None,
    "dense_model": "BAAI/bge-m3",
    "reranker_model": "BAAI/bge-reranker-v2-m3",
    "model_revision": None,
    "dense_model_revision": None,
    "reranker_model_revision": None,
    "hf_hub_offline": False,
    "device": "auto",
    "dtype": "auto",
    "attention": "auto",
    "pytorch_cuda_alloc_conf": "expandable_segments:True",
    "max_input_length": 8192,
    "embed_max_length": 8192,
    "qwen_embed_max_length": 32768,
    "bge_rerank_max_length": 8192,
    "qwen_rerank_max_length": 32768,
    "qwen_rerank_batch_size": 16,
    "max_batch_tokens": "auto",
    "max_requests_in_batch": None,
    "max_batch_sequences": None,
    "batch_wait_ms": 0,
    "tokenizer_threads": "auto",
    "torch_compile": False,
    "max_queue_size": 200,
    "rerank_max_queue": 32,
    "request_timeout": 90,
    "rerank_gpu_timeout": 60,
    "gpu_process_timeout": None,
    "shutdown_timeout": 30,
    "max_sentences_per_request": 1024,
    "max_rerank_passages": 1024,
    "max_body_bytes": 33_554_432,
    "api_token": None,
    "api_tokens_file": None,
    "protect_metrics": False,
    "rate_limit_requests_per_minute": 3600,
    "rate_limit_burst_size": 120,
    "rate_limit_store": SecretStr("memory"),
    "shared_rate_limit_store": None,
    "embedding_cache": SecretStr("off"),
    "embedding_cache_bytes": 268_435_456,
    "caches_embeddings": False,
    "shared_embedding_cache": None,
    "trusted_proxies": None,
    "cors_origins": None,
    "log_format": "console",
    "log_level": "info",
    "otlp_endpoint": None,
    "otel_service_name": "smart-embedder",
}


def test_defaults_are_those_of_the_contract() -> None:
    settings = load_settings()
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS


def test_every_wrong_value_is_named_at_once(monkeypatch) -> None:
    monkeypatch.setenv("PORT", "x")
    monkeypatch.setenv("DTYPE", "y")
    with pytest.raises(StartupError, match=r"PORT=x .*; DTYPE=y "):
        load_settings()


def test_an_empty_value_counts_as_not_set(monkeypatch) -> None:
    monkeypatch.setenv("DTYPE", "")
    monkeypatch.setenv("MAX_BATCH_TOKENS", "")
    assert load_settings() == Settings()


def test_dotenv_is_read_and_the_environment_wins(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PORT=9000\nDTYPE=float32\n")
    monkeypatch.setenv("PORT", "9001")
    assert (load_settings().port, load_settings().dtype) == (9001, "float32")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1
