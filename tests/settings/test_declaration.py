"""Each setting: its default, what several mean together, and what is told of it."""

from pathlib import Path

import pytest

from smart_embedder.errors import StartupError
from smart_embedder.settings import Settings
from smart_embedder.settings.declaration import (
    allowed,
    allowed_in,
    default,
    meaning,
    sections,
    shown,
    without_markup,
)
from smart_embedder.settings.types import ModelEntry

DEFAULTS = {
    "host": "127.0.0.1", "port": 8000,
    "embedding_model": "BAAI/bge-m3", "dense_embedding_model": None, "dense_model": "BAAI/bge-m3",
    "reranker_model": "BAAI/bge-reranker-v2-m3", "model_revision": None,
    "dense_model_revision": None, "reranker_model_revision": None, "hf_hub_offline": False,
    "device": "auto", "dtype": "auto", "attention": "auto",
    "pytorch_cuda_alloc_conf": "expandable_segments:True",
    "max_input_length": 8192, "embed_max_length": 8192, "qwen_embed_max_length": 32768,
    "bge_rerank_max_length": 8192, "qwen_rerank_max_length": 32768, "qwen_rerank_batch_size": 16,
    "max_batch_tokens": "auto", "max_requests_in_batch": None, "max_batch_sequences": None,
    "batch_wait_ms": 0, "tokenizer_threads": "auto", "torch_compile": False,
    "max_queue_size": 200, "rerank_max_queue": 32, "request_timeout": 90, "rerank_gpu_timeout": 60,
    "gpu_process_timeout": None, "shutdown_timeout": 30, "max_sentences_per_request": 1024,
    "max_rerank_passages": 1024, "max_body_bytes": 16_777_216,
    "api_token": None, "api_tokens_file": None, "protect_metrics": False,
    "rate_limit_requests_per_minute": 3600, "rate_limit_burst_size": 120,
    "embedding_cache_bytes": 0,
    "trusted_proxies": None, "cors_origins": None,
    "log_format": "console", "log_level": "info",
    "otlp_endpoint": None, "otel_service_name": "smart-embedder",
}  # fmt: skip


def test_defaults_are_those_of_the_contract() -> None:
    settings = Settings()
    assert {name: getattr(settings, name) for name in DEFAULTS} == DEFAULTS


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "cpu", "dtype": "float16"}, "DTYPE=float16 is for GPUs"),
        ({"device": "cpu:0,cpu:1", "dtype": "float16"}, "DTYPE=float16 is for GPUs"),
        *(
            ({"device": gpu, "dtype": "INT8"}, f"DTYPE=int8 is for CPUs; with DEVICE={gpu} use")
            for gpu in ("cuda", "cuda:1", "mps")
        ),
        *(
            (
                {"device": other, "dtype": "float8"},
                f"DTYPE=float8 is for NVIDIA GPUs; .*{other} use",
            )
            for other in ("cpu", "cpu:0,cpu:1", "mps")
        ),
        ({"rerank_gpu_timeout": 90}, "RERANK_GPU_TIMEOUT=90 must be below REQUEST_TIMEOUT=90"),
        ({"max_queu_size": 1}, "max_queu_size"),
    ],
)
def test_values_that_contradict_each_other_and_names_of_nothing_are_refused(
    values, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"device": "auto", "dtype": "float16"},
        {"device": "cuda", "dtype": "float16"},
        {"device": "mps", "dtype": "bfloat16"},
        {"device": "cpu", "dtype": "int8"},
        {"device": "auto", "dtype": "int8"},
        {"rerank_gpu_timeout": 89.9},
    ],
)
def test_values_that_go_together_are_taken(values) -> None:
    settings = Settings(**values)
    assert {name: getattr(settings, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "name", "meant"),
    [
        ({"max_input_length": 512}, "embed_max_length", 512),
        ({"max_input_length": 512, "bge_embed_max_length": 1024}, "embed_max_length", 1024),
        ({"reranker_model": "late-interaction"}, "reranker_name", "BAAI/bge-m3"),
        ({"reranker_model": "none"}, "reranker_name", "none"),
        ({"reranker_model": "own/reranker"}, "reranker_name", "own/reranker"),
        ({"embedding_model": "own/m3"}, "dense_model", "own/m3"),
        ({"embedding_model": "own/m3", "dense_embedding_model": "a/b"}, "dense_model", "a/b"),
        ({"device": "cuda:1, cuda:0,cuda:1"}, "devices", ["cuda:1", "cuda:0"]),
        ({"device": "CPU"}, "devices", ["cpu"]),
        ({"device": "cpu:0, CPU:1"}, "devices", ["cpu:0", "cpu:1"]),
        ({"hf_home": "~/models"}, "hub_cache", Path("/home/me/models/hub")),
    ],
)
def test_what_follows_from_several_settings(monkeypatch, values, name: str, meant: object) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert getattr(Settings(**values), name) == meant


def test_a_user_without_a_home_folder_is_told_to_name_one() -> None:
    nobody = Settings(hf_home=Path("~nobody-of-this-name/models"))
    with pytest.raises(StartupError, match=r"^HF_HOME=\S+ cannot be found: .* set HF_HOME"):
        _ = nobody.hub_cache


# What is told of a setting.


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dtype", "auto, float16, bfloat16, float32, int8 or float8"),
        ("torch_compile", "true or false"),
        ("port", "a number from 0 to 65535"),
        ("bge_embed_max_length", "a number of tokens, at least 1"),
        ("trusted_proxies", "addresses and networks separated by commas, such as 10.0.0.1,"),
        ("pooling", "cls, last_token, max, mean, mean_sqrt_length or weighted_mean"),
        ("host", "see HOST in .env.example"),
    ],
)
def test_what_is_allowed_is_told_by_the_type(name: str, text: str) -> None:
    assert allowed(name).startswith(text)


def test_a_default_is_written_as_in_dotenv() -> None:
    names = ("torch_compile", "reranker_model", "api_token", "max_queue_size")
    assert [default(name) for name in names] == ["false", "BAAI/bge-reranker-v2-m3", "", "200"]
    values = {name: default(name) for name in Settings.model_fields if default(name)}
    assert Settings.model_validate(values) == Settings()


def test_the_few_words_that_a_setting_may_be_stand_before_its_meaning() -> None:
    assert meaning("log_format").startswith("`console` or `json`: the form of the log; ")
    assert without_markup(meaning("log_format")).startswith("console or json: the form")


def test_what_a_model_of_the_file_may_have_is_told_by_the_type_too() -> None:
    fields = ModelEntry.model_fields
    names = ("task", "dtype", "revision", "pinned")
    assert [allowed_in(fields[name]) for name in names] == [
        "embed or rerank",
        "auto, float16, bfloat16, float32, int8 or float8",
        "a branch, tag or commit, in quotes",
        "true or false",
    ]
    assert allowed_in(fields["location"]) == ""


def test_sections_hold_their_settings_in_the_order_of_the_declaration() -> None:
    found = sections()
    assert found["Address"] == ["host", "port", "ui"]
    assert found["Traces"] == ["otlp_endpoint", "otel_service_name"]
    assert list(found)[:2] == ["Address", "Models"]


@pytest.mark.parametrize(
    ("name", "value", "is_shown"),
    [
        ("PORT", "eighty", True),
        ("API_TOKEN", "x", False),
        ("HTTPS_PROXY", "http://proxy:3128", False),
        ("EMBEDDING_MODEL", "user:key@hub/m3", False),
        ("EMBEDDING_MODEL", "own/m3?x", True),
        ("EMBEDDING_MODEL", "https://hub.example/m3", False),
        ("CORS_ORIGINS", "https://app.example.com:port", True),
        ("OTLP_ENDPOINT", "collector:4318", True),
        ("OTLP_ENDPOINT", "collector:4318/key", False),
        ("HF_ENDPOINT", "hub.example/key", False),
        ("HF_ENDPOINT", "ftp://hub.example/", True),
        ("QUERY_PROMPT", "a/b", True),
    ],
)
def test_a_value_is_shown_unless_it_may_hold_a_password_or_a_key(
    name: str, value: str, is_shown: bool
) -> None:
    assert shown(name, value) == (value if is_shown else "**********")
