"""What is told of a setting comes from its declaration."""

import pytest

from app.settings import Settings
from app.settings.describe import allowed, default, meaning, without_markup


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dtype", "auto, float16, bfloat16, float32 or int8"),
        ("torch_compile", "true or false"),
        ("port", "a number from 0 to 65535"),
        ("bge_embed_max_length", "a number of tokens, at least 1"),
        ("trusted_proxies", "addresses and networks separated by commas, such as 10.0.0.1,"),
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
