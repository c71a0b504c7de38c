"""smart_embedder/errors.py."""

import pytest

from smart_embedder.errors import (
    InvalidRequestError,
    SmartEmbedderError,
    StartupError,
    UnavailableError,
)


@pytest.mark.parametrize(("known", "told"), [(None, None), (1, 1), (29, 29), (30, 30), (31, 30)])
def test_no_client_is_told_to_wait_longer_than_it_would(
    known: int | None, told: int | None
) -> None:
    assert UnavailableError("busy", retry_after=known).retry_after == told


def test_an_error_says_its_sentence_and_where_the_request_is_wrong() -> None:
    problems = [{"pointer": "/sentences/0", "message": "is no text"}]
    error = InvalidRequestError("One sentence.", problems)
    assert (str(error), error.problems, error.retry_after) == ("One sentence.", problems, None)
    assert InvalidRequestError("One sentence.").problems == []


def test_codes_are_words_of_one_error_each_unless_they_mean_the_same() -> None:
    def all_below(kind: type[SmartEmbedderError]) -> list[type[SmartEmbedderError]]:
        return [kind, *(each for sub in kind.__subclasses__() for each in all_below(sub))]

    kinds = all_below(SmartEmbedderError)
    codes = [vars(kind)["code"] for kind in kinds if "code" in vars(kind)]
    shared = {code for code in codes if codes.count(code) > 1}
    assert shared == {"inference_failed"}


def test_what_a_start_error_quotes_of_files_is_one_line_that_can_be_printed() -> None:
    quoted = str(StartupError("the tensor a\nb\x1b[2J\u202ec is in half"))
    assert quoted == "the tensor a\\nb\\x1b[2J\\u202ec is in half"
    long = str(StartupError(f"the tensor {'x' * 10_000_000} is in half"))
    assert long.startswith("the tensor xxx")
    assert long.endswith("xxx is in half")
    assert " ... " in long
    assert len(long) < 2010
