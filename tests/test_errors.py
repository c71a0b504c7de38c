"""smart_embedder/errors.py."""

import pytest

from smart_embedder.errors import InvalidRequestError, SmartEmbedderError, UnavailableError


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
