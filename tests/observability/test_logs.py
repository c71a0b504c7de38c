"""What clients can write into a log, and how often."""

from structlog.testing import capture_logs

from app.observability.logs import SampledLog, escape_text


def test_a_clients_text_cannot_end_a_line_move_the_cursor_or_turn_the_writing() -> None:
    assert escape_text("a\nb\x1b[2J\u202ec") == "a\\nb\\x1b[2J\\u202ec"
    assert escape_text("ß 漢") == "ß 漢"
    assert escape_text("x" * 1000) == "x" * 200


def test_an_event_that_repeats_is_logged_once_in_a_while_and_the_rest_counted() -> None:
    log = SampledLog(seconds=60)
    with capture_logs() as lines:
        for number in range(3):
            log.warning("malformed", number=number)
        log.warning("another")
        log._quiet_until.clear()  # The minute is over.
        log.warning("malformed", number=3)
    seen = [(line["event"], line.get("number"), line["left_out"]) for line in lines]
    assert seen == [("malformed", 0, 0), ("another", None, 0), ("malformed", 3, 2)]
