"""What the log says of a start, for which people and scripts wait."""

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from smart_embedder.errors import StartupError
from smart_embedder.server.process import log_failure, log_ready, warn_of_misspelt_names
from tests.engine.fakes import FakeModel, FakeReranker, loaded


def test_a_ready_service_tells_its_address_and_the_limits_in_force() -> None:
    with capture_logs() as log:
        log_ready(loaded(FakeModel(), 640), "http://127.0.0.1:8000")
    (ready,) = log
    assert ready == {
        "event": "Server ready to accept requests",
        "log_level": "info",
        "url": "http://127.0.0.1:8000",
        "model": "fake",
        "max_length": 100,
        "device": "fake",
        "dtype": "float32",
        "attention": "sdpa",
        "max_batch_tokens": 640,
    }
    with capture_logs() as log:
        log_ready(loaded(FakeModel()))
    assert "url" not in log[0]


def test_a_reranker_is_told_of_first_with_its_own_limits() -> None:
    reranker = FakeReranker()
    reranker.name, reranker.max_length, reranker.max_batch_sequences = "scores", 77, 4
    with capture_logs() as log:
        log_ready(loaded(FakeModel(), reranker=reranker))
    assert [each["event"] for each in log] == ["Reranker ready.", "Server ready to accept requests"]
    assert (log[0]["model"], log[0]["max_length"], log[0]["max_pairs_in_forward"]) == (
        "scores", 77, 4,
    )  # fmt: skip
    assert "max_pairs_in_forward" not in log[1]


def test_an_embedder_that_scores_passages_is_the_reranker_and_a_demo_says_so() -> None:
    models = replace(loaded(FakeModel()), late_interaction=True, demo="a small model")
    with capture_logs() as log:
        log_ready(models)
    assert [each["event"] for each in log] == [
        "Reranker ready.", "demo_model", "Server ready to accept requests",
    ]  # fmt: skip
    assert (log[0]["model"], log[1]["note"]) == ("fake", "a small model")


@pytest.mark.parametrize("unforeseen", [False, True])
def test_a_failed_start_ends_with_its_reason_and_only_the_unforeseen_has_a_traceback(
    unforeseen: bool,
) -> None:
    error = ValueError("one\ntwo") if unforeseen else StartupError("the folder is not there")
    with capture_logs() as log:
        log_failure(error)
    assert [each["event"] for each in log] == ["unexpected_error"] * unforeseen + ["start_failed"]
    assert log[-1]["reason"] == (
        "unexpected error while loading: ValueError: one"
        if unforeseen
        else "the folder is not there"
    )
    assert [each["exc_info"] for each in log[:-1]] == [error] * unforeseen


def test_a_name_that_is_nearly_a_settings_is_warned_of(monkeypatch) -> None:
    monkeypatch.setenv("MAX_QUEU_SIZE", "3")
    with capture_logs() as log:
        warn_of_misspelt_names()
    (warning,) = [each for each in log if each["name"] == "MAX_QUEU_SIZE"]
    assert (warning["event"], warning["nearest"]) == ("unknown_setting", "MAX_QUEUE_SIZE")
