"""Settings: defaults, allowed and refused values, and error messages."""

from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings, load_settings
from smart_embedder.errors import StartupError
from smart_embedder.settings import (
    EngineSettings,
    allowed_in,
    public_name,
)
from tests.support.no_settings import empty_environment  # noqa: F401 - used by each test


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
        *(
            (
                {"reranker_kind": "zerank-2", "reranker_model": model},
                f"RERANKER_KIND=zerank-2 has no effect with RERANKER_MODEL={model}",
            )
            for model in ("late-interaction", "none")
        ),
        ({"rerank_gpu_timeout": 90}, "RERANK_GPU_TIMEOUT=90 must be below REQUEST_TIMEOUT=90"),
        ({"max_queu_size": 1}, "max_queu_size"),
    ],
)
def test_contradicting_values_and_unknown_names_are_refused(values, message: str) -> None:
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
def test_compatible_values_are_accepted(values) -> None:
    settings = Settings(**values)
    assert {name: getattr(settings, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "name", "expected"),
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
def test_values_derived_from_several_settings(monkeypatch, values, name, expected) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert getattr(Settings(**values), name) == expected


def test_a_user_without_a_home_folder_must_set_hf_home() -> None:
    nobody = Settings(hf_home=Path("~nobody-of-this-name/models"))
    with pytest.raises(StartupError, match=r"^HF_HOME=\S+ cannot be found: .* set HF_HOME"):
        _ = nobody.hub_cache


# Descriptions of allowed values.


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dtype", "auto, float16, bfloat16, float32, int8 or float8"),
        ("reproducible", "true or false"),
        ("port", "a number from 0 to 65535"),
        ("bge_embed_max_length", "a number of tokens, at least 1"),
        ("host", ""),
    ],
)
def test_the_allowed_values_of_a_setting(name: str, text: str) -> None:
    assert allowed_in(Settings.model_fields[name]).startswith(text)


def test_engine_settings_ignore_the_environment(monkeypatch, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("PORT=9000\nDTYPE=float64\n")
    monkeypatch.setenv("MAX_QUEUE_SIZE", "none")
    settings = EngineSettings(device="cpu")
    assert (settings.device, settings.dtype, settings.max_queue_size) == ("cpu", "auto", 200)


# Values.

# Values that are refused.
WRONG = {
    "0": (
        *("MODEL_MEMORY_THRESHOLD", "GPU_PROCESS_TIMEOUT", "MAX_BATCH_TOKENS", "MAX_QUEUE_SIZE"),
        "RATE_LIMIT_REQUESTS_PER_MINUTE",
    ),
    "-1": ("PORT", "BATCH_WAIT_MS", "SHUTDOWN_DELAY", "EMBEDDING_CACHE_BYTES"),
    "inf": ("SHUTDOWN_DELAY", "REQUEST_TIMEOUT"),
    "many": (
        *("MAX_BATCH_TOKENS", "PORT", "SHUTDOWN_TIMEOUT", "REPRODUCIBLE", "DTYPE", "LOG_LEVEL"),
        *("MODEL_ALIASES", "DEVICE", "TRUSTED_PROXIES", "CORS_ORIGINS", "OTLP_ENDPOINT"),
    ),
    "   ": ("EMBEDDING_MODEL", "RERANKER_MODEL"),
}
WRONG_ONES = {
    "PORT": ["65536"],
    "BATCH_WAIT_MS": ["1000.1"],
    "MODEL_MEMORY_THRESHOLD": ["1.01"],
    "BGE_EMBED_MAX_LENGTH": ["1.5"],
    "MAX_BODY_BYTES": ["32M"],
    "MODEL_ALIASES": ["small=,large=BAAI/bge-m3"],
    "DEVICE": ["gpu", "cuda:x", "cuda:0,cpu", "cpu:0,cuda:0", "cpu,cpu:0"],
    "TRUSTED_PROXIES": ["10.0.0.1/8", "10.0.0.256"],
    "CORS_ORIGINS": ["null", "https:", "https://", "https://a.example:port"],
    "OTLP_ENDPOINT": ["collector:4318", "http://", "http://collector:port", "grpc://a:4317"],
}

ZERO_OR_MORE = ("PORT", "BATCH_WAIT_MS", "SHUTDOWN_DELAY", "EMBEDDING_CACHE_BYTES")
AT_LEAST_1 = ("MODEL_MEMORY_THRESHOLD", "MAX_BATCH_TOKENS", "MAX_QUEUE_SIZE", "MAX_BODY_BYTES")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for value, names in WRONG.items() for name in names),
        *((name, value) for name, values in WRONG_ONES.items() for value in values),
    ],
)
def test_an_error_names_the_variable_the_value_and_the_allowed_values(
    monkeypatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    assert str(caught.value).startswith(f"{name}={value} is not allowed: ")
    assert not str(caught.value).endswith(f"see {name} in .env.example")


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        *((name, "0", 0) for name in ZERO_OR_MORE),
        *((name, "1", 1) for name in AT_LEAST_1),
        ("PORT", "65535", 65_535),
        ("BATCH_WAIT_MS", "1000", 1000),
        ("QUERY_PROMPT", "a" * 4096, "a" * 4096),
        ("DTYPE", "BFloat16", "bfloat16"),
        ("DEVICE", "CPU", "cpu"),
        ("MODEL_ALIASES", " small = own/bge ,b=c=d", {"small": "own/bge", "b": "c=d"}),
        (
            "TRUSTED_PROXIES",
            "10.0.0.1, 172.16.0.0/12,fd00::/8",
            tuple(map(ip_network, ("10.0.0.1/32", "172.16.0.0/12", "fd00::/8"))),
        ),
        (
            "CORS_ORIGINS",
            "https://App.example.com/, http://localhost:3000,https://a.example:443,*",
            ("https://app.example.com", "http://localhost:3000", "https://a.example", "*"),
        ),
        (
            "CORS_ORIGINS",
            "app://obsidian.md,VSCode-webview://",
            ("app://obsidian.md", "vscode-webview://"),
        ),
        ("OTLP_ENDPOINT", " http://collector:4318 ", "http://collector:4318"),
        ("OTLP_ENDPOINT", "https://collector/v1/traces", "https://collector/v1/traces"),
        ("EMBEDDING_MODEL", " own/m3 ", "own/m3"),
        ("EMBEDDING_MODEL", "./models/m3@2:1", "./models/m3@2:1"),
        ("RERANKER_MODEL", "None", "none"),
        ("RERANKER_MODEL", "Late-Interaction ", "late-interaction"),
        ("RERANKER_MODEL", "Own/Reranker", "Own/Reranker"),
    ],
)
def test_values_at_their_limits_are_accepted(
    monkeypatch, name: str, value: str, kept: object
) -> None:
    monkeypatch.setenv(name, value)
    assert getattr(load_settings(), name.lower()) == kept


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("QUERY_PROMPT", "a" * 4097, "QUERY_PROMPT=aaa.* is not allowed: a text of at most 4,096"),
        # Of several the wrong one is named.
        ("TRUSTED_PROXIES", "10.0.0.1,any", "TRUSTED_PROXIES=any is not allowed: addresses and"),
    ],
)
def test_invalid_texts_and_lists_are_refused(monkeypatch, name, value, message) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=f"^{message}"):
        load_settings()


def test_aliases_can_be_a_dictionary() -> None:
    assert Settings(model_aliases={"small": "own/bge"}).model_aliases == {"small": "own/bge"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTLP_ENDPOINT", "http://user:hush@collector:4318"),
        ("OTLP_ENDPOINT", "http://collector:4318?token=hush"),
        ("OTLP_ENDPOINT", "collector:4318/hush"),
        ("OTLP_ENDPOINT", "http://collector:4318#hush"),
        ("OTLP_ENDPOINT", "http://a:4318/ hush"),
        ("EMBEDDING_MODEL", "https://user:hush@hub.example/m3"),
        ("EMBEDDING_MODEL", "user:hush@hub.example/m3"),
        ("RERANKER_MODEL", "https://hub.example/hush/m3"),
        ("CORS_ORIGINS", "https://a.example/hush"),
        ("CORS_ORIGINS", "https://user:hush@a.example"),
        ("PORT", "http://:hush@localhost"),
    ],
)
def test_an_address_with_a_password_or_key_is_refused_and_hidden(
    monkeypatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    assert str(caught.value).startswith(f"{name}=********** is not allowed: ")
    values: dict[str, Any] = {name.lower(): value}
    with pytest.raises(ValueError, match=name.lower()) as raised:
        Settings(**values)
    assert "hush" not in f"{caught.value} {raised.value}"


# Public names of models.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, name) for name in ("BAAI/bge-m3", "bge-m3", "late-interaction", "none")),
        *(
            (folder, "bge-m3")
            for folder in (
                *("/home/me/models/bge-m3", "/home/me/models/bge-m3/", "/home/me/models/bge-m3//"),
                *("/home/me/models/other/../bge-m3", "./bge-m3", "../models/bge-m3/"),
                *("~/models/bge-m3", "models/of/mine/bge-m3", "C:\\models\\bge-m3"),
                "https://user:secret@hub.example/models/bge-m3",
            )
        ),
    ],
)
def test_the_public_name_of_a_hub_id_and_of_a_folder(name, expected) -> None:
    assert public_name(name) == expected


def test_the_public_name_of_a_folder_that_looks_like_a_hub_id(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "there" / "my-bge").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("there/my-bge") == "my-bge"
    assert public_name("there/another") == "there/another"
    monkeypatch.chdir(tmp_path / "there" / "my-bge")
    public_name.cache_clear()
    assert public_name(".") == "my-bge"
    assert public_name("/") == "model"
    public_name.cache_clear()
