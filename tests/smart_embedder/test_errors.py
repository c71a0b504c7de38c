"""Errors: messages, codes and Retry-After."""

import pytest

from smart_embedder.errors import (
    SmartEmbedderError,
    StartupError,
    UnavailableError,
    one_line,
)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(None, None), (1, 1), (29, 29), (30, 30), (31, 30)]
)
def test_retry_after_is_at_most_30_seconds(seconds: int | None, expected: int | None) -> None:
    assert UnavailableError("busy", retry_after=seconds).retry_after == expected


def test_error_codes_are_unique_except_inference_failed() -> None:
    def list_classes(class_: type[SmartEmbedderError]) -> list[type[SmartEmbedderError]]:
        return [class_, *(sub for base in class_.__subclasses__() for sub in list_classes(base))]

    classes = list_classes(SmartEmbedderError)
    codes = [vars(class_)["code"] for class_ in classes if "code" in vars(class_)]
    shared = {code for code in codes if codes.count(code) > 1}
    assert shared == {"inference_failed"}


def test_a_message_of_several_lines_becomes_one_and_no_message_the_class() -> None:
    assert one_line(ValueError("no\n  kernel ")) == "no kernel"
    assert one_line(StopIteration()) == "StopIteration"


def test_the_message_of_a_startup_error_is_one_printable_line() -> None:
    quoted = str(StartupError("the tensor a\nb\x1b[2J\u202ec is in half"))
    assert quoted == "the tensor a\\nb\\x1b[2J\\u202ec is in half"
    long = str(StartupError(f"the tensor {'x' * 10_000_000} is in half"))
    assert long.startswith("the tensor xxx")
    assert long.endswith("xxx is in half")
    assert " ... " in long
    assert len(long) < 2010
