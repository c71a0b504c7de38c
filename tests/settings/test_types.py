"""The types of settings: what is taken, how it is kept, and how what is wrong is refused."""

from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from smart_embedder.errors import StartupError
from smart_embedder.settings import Settings
from smart_embedder.settings.sources import load_settings
from smart_embedder.settings.types import public_name

# What is wrong for each of these.
WRONG = {
    "0": (
        *("MODEL_MEMORY_THRESHOLD", "GPU_PROCESS_TIMEOUT", "MAX_BATCH_TOKENS"),
        *("MAX_REQUESTS_IN_BATCH", "TOKENIZER_THREADS", "MAX_QUEUE_SIZE", "REQUEST_TIMEOUT"),
        *("MAX_SENTENCES_PER_REQUEST", "QWEN_RERANK_BATCH_SIZE", "MAX_RERANK_PASSAGES"),
        "RATE_LIMIT_REQUESTS_PER_MINUTE",
    ),
    "-1": (
        *("PORT", "BATCH_WAIT_MS", "SHUTDOWN_DELAY", "MAX_INPUT_LENGTH", "RATE_LIMIT_BURST_SIZE"),
        *("RERANK_MAX_QUEUE", "EMBEDDING_CACHE_BYTES"),
    ),
    "inf": ("SHUTDOWN_DELAY", "REQUEST_TIMEOUT"),
    "many": (
        *("MAX_BATCH_TOKENS", "PORT", "MAX_BATCH_SEQUENCES", "RATE_LIMIT_REQUESTS_PER_MINUTE"),
        *("SHUTDOWN_TIMEOUT", "TORCH_COMPILE", "HF_HUB_OFFLINE", "PROTECT_METRICS"),
        *("DTYPE", "ATTENTION", "LOG_FORMAT", "LOG_LEVEL", "MODEL_ALIASES", "DEVICE"),
        *("TRUSTED_PROXIES", "CORS_ORIGINS", "OTLP_ENDPOINT"),
    ),
    "   ": ("EMBEDDING_MODEL", "RERANKER_MODEL"),
}
WRONG_ONES = {
    "PORT": ["65536"],
    "BATCH_WAIT_MS": ["1000.1"],
    "MODEL_MEMORY_THRESHOLD": ["1.01"],
    "BGE_EMBED_MAX_LENGTH": ["1.5"],
    "MAX_BODY_BYTES": ["32M"],
    "DTYPE": ["float64"],
    "ATTENTION": ["flash"],
    "MODEL_ALIASES": ["small=,large=BAAI/bge-m3"],
    "DEVICE": ["gpu", "cuda:x", "cuda:0,cpu", "cpu:0,cuda:0", "cpu,cpu:0"],
    "TRUSTED_PROXIES": ["10.0.0.1/8", "10.0.0.256"],
    "CORS_ORIGINS": ["null"],
    "OTLP_ENDPOINT": ["collector:4318", "http://", "http://collector:port", "grpc://a:4317"],
}

ZERO_OR_MORE = ("PORT", "BATCH_WAIT_MS", "SHUTDOWN_DELAY", "EMBEDDING_CACHE_BYTES")
AT_LEAST_1 = (
    *("MODEL_MEMORY_THRESHOLD", "MAX_INPUT_LENGTH", "MAX_BATCH_TOKENS", "MAX_REQUESTS_IN_BATCH"),
    *("MAX_BATCH_SEQUENCES", "TOKENIZER_THREADS", "QWEN_RERANK_BATCH_SIZE", "MAX_QUEUE_SIZE"),
    *("MAX_SENTENCES_PER_REQUEST", "MAX_BODY_BYTES"),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for value, names in WRONG.items() for name in names),
        *((name, value) for name, values in WRONG_ONES.items() for value in values),
    ],
)
def test_a_wrong_value_names_the_variable_the_value_and_what_is_allowed(
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
        ("OTLP_ENDPOINT", " http://collector:4318 ", "http://collector:4318"),
        ("OTLP_ENDPOINT", "https://collector/v1/traces", "https://collector/v1/traces"),
        ("HF_ENDPOINT", "https://hub.example:8443/", "https://hub.example:8443/"),
        ("EMBEDDING_MODEL", " own/m3 ", "own/m3"),
        ("EMBEDDING_MODEL", "./models/m3@2:1", "./models/m3@2:1"),
        ("RERANKER_MODEL", "None", "none"),
        ("RERANKER_MODEL", "Late-Interaction ", "late-interaction"),
        ("RERANKER_MODEL", "Own/Reranker", "Own/Reranker"),
    ],
)
def test_a_value_is_taken_up_to_its_limits_and_kept_as_it_is_meant(
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
        *(
            ("CORS_ORIGINS", f"https://a.example,{wrong}", r"CORS_ORIGINS=\S+ is not .*: origins")
            for wrong in (
                "https://a.example/page",
                "https://user@a.example",
                "https://a.example:port",
                "null",
                "https:",
            )
        ),
    ],
)
def test_what_is_wrong_in_a_text_or_a_list_is_refused(monkeypatch, name, value, message) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=f"^{message}"):
        load_settings()


def test_aliases_are_a_dictionary_in_a_program() -> None:
    assert Settings(model_aliases={"small": "own/bge"}).model_aliases == {"small": "own/bge"}


@pytest.mark.parametrize(
    ("names", "value"),
    [
        *(
            (["OTLP_ENDPOINT"], address)
            for address in (
                *("http://user:hush@collector:4318", "http://collector:4318?token=hush"),
                *("collector:4318/hush", "http://collector:4318#hush", "http://a:4318/ hush"),
            )
        ),
        (["EMBEDDING_MODEL"], "https://user:hush@hub.example/m3"),
        (["EMBEDDING_MODEL"], "user:hush@hub.example/m3"),
        (["DENSE_EMBEDDING_MODEL"], "https://hub.example/m3?token=hush"),
        (["RERANKER_MODEL"], "https://hub.example/hush/m3"),
        (["PORT"], "http://:hush@localhost"),
    ],
)
def test_a_password_or_key_in_an_address_is_refused_and_never_shown(
    monkeypatch, names: list[str], value: str
) -> None:
    for name in names:
        monkeypatch.setenv(name, value)
        with pytest.raises(StartupError) as caught:
            load_settings()
        monkeypatch.delenv(name)
        assert str(caught.value).startswith(f"{name}=********** is not allowed: ")
        values: dict[str, Any] = {name.lower(): value}
        with pytest.raises(ValueError, match=name.lower()) as raised:
            Settings(**values)
        assert "hush" not in f"{caught.value} {raised.value}"


# What a model is called in public: where its folder lies is never told.


@pytest.mark.parametrize(
    ("name", "told"),
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
def test_a_hub_id_is_its_own_name_and_a_folder_is_called_by_the_end_of_its_path(name, told) -> None:
    assert public_name(name) == told


def test_a_folder_is_one_though_it_looks_like_a_hub_id_and_has_a_name_where_one_stands_in_it(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "there" / "my-bge").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_name("there/my-bge") == "my-bge"
    assert public_name("there/another") == "there/another"
    monkeypatch.chdir(tmp_path / "there" / "my-bge")
    public_name.cache_clear()
    assert public_name(".") == "my-bge"
    assert public_name("/") == "model"
    public_name.cache_clear()
