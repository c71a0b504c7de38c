"""What is told of a setting comes from its declaration."""

import pytest

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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dtype", "auto, float16, bfloat16, float32 or int8"),
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
    names = ("torch_compile", "rate_limit_store", "api_token", "max_queue_size")
    assert [default(name) for name in names] == ["false", "memory", "", "200"]
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
        "auto, float16, bfloat16, float32 or int8",
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
        ("EMBEDDING_CACHE", "of", False),
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
