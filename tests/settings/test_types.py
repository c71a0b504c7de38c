"""The types of settings: what is taken, how it is kept, and how what is wrong is refused."""

from ipaddress import ip_network
from typing import Any

import pytest

from smart_embedder.errors import StartupError
from smart_embedder.settings import Settings
from smart_embedder.settings.sources import load_settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "eighty"),
        ("PORT", "65536"),
        ("PORT", "-1"),
        ("BATCH_WAIT_MS", "1000.1"),
        ("SHUTDOWN_DELAY", "-0.1"),
        ("SHUTDOWN_DELAY", "inf"),
        ("MODEL_MEMORY_THRESHOLD", "0"),
        ("MODEL_MEMORY_THRESHOLD", "1.01"),
        ("MODEL_ALIASES", "small"),
        ("MODEL_ALIASES", "small=,large=BAAI/bge-m3"),
        ("DEVICE", "gpu"),
        ("DEVICE", "cuda:x"),
        ("DEVICE", "cuda:0,cpu"),
        ("DEVICE", "cpu:0,cuda:0"),
        ("DEVICE", "cpu,cpu:0"),
        ("GPU_PROCESS_TIMEOUT", "0"),
        ("DTYPE", "float64"),
        ("ATTENTION", "flash"),
        ("MAX_BATCH_TOKENS", "0"),
        ("MAX_BATCH_TOKENS", "many"),
        ("MAX_INPUT_LENGTH", "-1"),
        ("BGE_EMBED_MAX_LENGTH", "1.5"),
        ("MAX_REQUESTS_IN_BATCH", "0"),
        ("MAX_BATCH_SEQUENCES", "none"),
        ("BATCH_WAIT_MS", "-1"),
        ("TOKENIZER_THREADS", "0"),
        ("TORCH_COMPILE", "perhaps"),
        ("MAX_QUEUE_SIZE", "0"),
        ("REQUEST_TIMEOUT", "inf"),
        ("REQUEST_TIMEOUT", "0"),
        ("SHUTDOWN_TIMEOUT", "soon"),
        ("MAX_SENTENCES_PER_REQUEST", "0"),
        ("MAX_BODY_BYTES", "32M"),
        ("HF_HUB_OFFLINE", "perhaps"),
        ("PROTECT_METRICS", "perhaps"),
        ("LOG_FORMAT", "xml"),
        ("LOG_LEVEL", "loud"),
        ("EMBEDDING_MODEL", "   "),
        ("RERANKER_MODEL", "   "),
        ("QWEN_RERANK_BATCH_SIZE", "0"),
        ("RERANK_MAX_QUEUE", "-3"),
        ("MAX_RERANK_PASSAGES", "0"),
        ("RATE_LIMIT_REQUESTS_PER_MINUTE", "0"),
        ("RATE_LIMIT_REQUESTS_PER_MINUTE", "many"),
        ("RATE_LIMIT_BURST_SIZE", "-1"),
        ("TRUSTED_PROXIES", "proxy.example"),
        ("TRUSTED_PROXIES", "10.0.0.1/8"),
        ("TRUSTED_PROXIES", "10.0.0.256"),
        ("CORS_ORIGINS", "null"),
        ("CORS_ORIGINS", "app.example.com"),
        ("OTLP_ENDPOINT", "collector:4318"),
        ("OTLP_ENDPOINT", "http://"),
        ("OTLP_ENDPOINT", "http://collector:port"),
        ("OTLP_ENDPOINT", "grpc://collector:4317"),
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
    ("name", "value"),
    [
        ("PORT", 0),
        ("PORT", 65_535),
        ("BATCH_WAIT_MS", 0),
        ("BATCH_WAIT_MS", 1000),
        ("SHUTDOWN_DELAY", 0),
        ("MODEL_MEMORY_THRESHOLD", 1),
        ("MAX_INPUT_LENGTH", 1),
        ("MAX_BATCH_TOKENS", 1),
        ("MAX_REQUESTS_IN_BATCH", 1),
        ("MAX_BATCH_SEQUENCES", 1),
        ("TOKENIZER_THREADS", 1),
        ("QWEN_RERANK_BATCH_SIZE", 1),
        ("EMBEDDING_CACHE_BYTES", 1),
        ("MAX_QUEUE_SIZE", 1),
        ("MAX_SENTENCES_PER_REQUEST", 1),
        ("MAX_BODY_BYTES", 1),
        ("QUERY_PROMPT", "a" * 4096),
    ],
)
def test_a_value_at_its_limit_is_taken(monkeypatch, name: str, value: object) -> None:
    monkeypatch.setenv(name, str(value))
    assert getattr(load_settings(), name.lower()) == value


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
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
def test_an_address_or_a_name_is_kept_as_it_is_meant(
    monkeypatch, name: str, value: str, kept: str
) -> None:
    monkeypatch.setenv(name, value)
    assert getattr(load_settings(), name.lower()) == kept


def test_a_prompt_beyond_its_limit_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("QUERY_PROMPT", "a" * 4097)
    with pytest.raises(StartupError, match="a text of at most 4,096 characters"):
        load_settings()


def test_aliases_are_pairs_or_in_a_program_a_dictionary(monkeypatch) -> None:
    assert Settings(model_aliases={"small": "own/bge"}).model_aliases == {"small": "own/bge"}
    monkeypatch.setenv("MODEL_ALIASES", " small = own/bge ,b=c=d")
    assert load_settings().model_aliases == {"small": "own/bge", "b": "c=d"}


def test_trusted_proxies_are_addresses_and_networks(monkeypatch) -> None:
    monkeypatch.setenv("TRUSTED_PROXIES", "10.0.0.1, 172.16.0.0/12,fd00::/8")
    networks = ("10.0.0.1/32", "172.16.0.0/12", "fd00::/8")
    assert load_settings().trusted_proxies == tuple(map(ip_network, networks))


def test_origins_are_kept_as_browsers_write_them(monkeypatch) -> None:
    written = "https://App.example.com/, http://localhost:3000,https://a.example:443,*"
    monkeypatch.setenv("CORS_ORIGINS", written)
    kept = ("https://app.example.com", "http://localhost:3000", "https://a.example", "*")
    assert load_settings().cors_origins == kept


@pytest.mark.parametrize(
    "wrong",
    [
        "https://a.example/page",
        "https://user@a.example",
        "https://a.example:port",
        "null",
        "https:",
    ],
)
def test_what_is_no_origin_stops_the_start(monkeypatch, wrong: str) -> None:
    monkeypatch.setenv("CORS_ORIGINS", f"https://app.example.com,{wrong}")
    with pytest.raises(StartupError, match=r"^CORS_ORIGINS=\S+ is not allowed: origins separated"):
        load_settings()


def test_of_several_trusted_proxies_the_wrong_one_is_named(monkeypatch) -> None:
    monkeypatch.setenv("TRUSTED_PROXIES", "10.0.0.1,any")
    with pytest.raises(StartupError, match=r"^TRUSTED_PROXIES=any is not allowed: addresses and"):
        load_settings()


@pytest.mark.parametrize(
    "address", ["redis://localhost", "redis://:secret@10.0.0.1:6380/2", "rediss://u:p@[::1]:6379/"]
)
def test_the_rate_limit_may_live_in_a_redis(monkeypatch, address: str) -> None:
    monkeypatch.setenv("RATE_LIMIT_STORE", address)
    assert load_settings().shared_rate_limit_store == address
    assert address not in repr(load_settings())


@pytest.mark.parametrize(
    "address",
    [
        "disk",
        "redis://",
        "http://:secret@localhost",
        "redis://:sec#ret@localhost",
        "redis://:secret@localhost:port",
        "redis://:secret@localhost/name",
        "redis://localhost?password=secret",
    ],
)
@pytest.mark.parametrize(
    ("name", "words"), [("RATE_LIMIT_STORE", "memory"), ("EMBEDDING_CACHE", "off, memory")]
)
def test_a_wrong_store_is_refused_and_never_shown(monkeypatch, name, words, address) -> None:
    monkeypatch.setenv(name, address)
    with pytest.raises(StartupError) as caught:
        load_settings()
    message = str(caught.value)
    assert message.startswith(f"{name}=********** is not allowed: {words}, or an address")
    assert "sec" not in message


@pytest.mark.parametrize(
    ("value", "caches", "shared"),
    [
        ("Off", False, None),
        (" memory", True, None),
        ("redis://:secret@localhost/1", True, "redis://:secret@localhost/1"),
    ],
)
def test_the_embedding_cache_is_off_in_memory_or_in_a_redis(
    monkeypatch, value, caches, shared
) -> None:
    monkeypatch.setenv("EMBEDDING_CACHE", value)
    settings = load_settings()
    assert (settings.caches_embeddings, settings.shared_embedding_cache) == (caches, shared)
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTLP_ENDPOINT", "http://user:hush@collector:4318"),
        ("OTLP_ENDPOINT", "http://collector:4318?token=hush"),
        ("OTLP_ENDPOINT", "collector:4318/hush"),
        ("OTLP_ENDPOINT", "http://collector:4318#hush"),
        ("OTLP_ENDPOINT", "http://collector:4318/ hush"),
        ("EMBEDDING_MODEL", "https://user:hush@hub.example/m3"),
        ("EMBEDDING_MODEL", "user:hush@hub.example/m3"),
        ("DENSE_EMBEDDING_MODEL", "https://hub.example/m3?token=hush"),
        ("RERANKER_MODEL", "https://hub.example/hush/m3"),
        ("PORT", "redis://:hush@localhost"),
    ],
)
def test_a_password_or_key_in_an_address_is_refused_and_never_shown(
    monkeypatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(StartupError) as caught:
        load_settings()
    assert str(caught.value).startswith(f"{name}=********** is not allowed: ")
    assert "hush" not in str(caught.value)
    values: dict[str, Any] = {name.lower(): value}
    with pytest.raises(ValueError, match=name.lower()) as raised:
        Settings(**values)
    assert "hush" not in str(raised.value)


def test_case_does_not_matter_where_words_are_chosen(monkeypatch) -> None:
    monkeypatch.setenv("DTYPE", "BFloat16")
    monkeypatch.setenv("DEVICE", "CPU")
    assert (load_settings().dtype, load_settings().device) == ("bfloat16", "cpu")


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("cuda:0, cuda:1", ["cuda:0", "cuda:1"]),
        ("CPU", ["cpu"]),
        ("cuda:1,cuda:1", ["cuda:1"]),
        ("cpu:0, CPU:1", ["cpu:0", "cpu:1"]),
        ("cpu:0,cpu:0", ["cpu:0"]),
    ],
)
def test_each_device_that_is_named_is_one_worker(monkeypatch, value: str, devices) -> None:
    monkeypatch.setenv("DEVICE", value)
    assert load_settings().devices == devices
