"""Clients that stop, or leave, in the middle of their body.

Sent 61: 10 answered, 1 refused (408), 50 left, 0 lost. Healthy before and after.
"""

import json

from tests.faults.raw import connect, head, read_status
from tests.faults.tally import GOOD, tally

BODY = json.dumps(GOOD).encode()


def test_clients_that_leave_in_the_middle_of_their_body_cost_nobody_an_answer(impatient) -> None:
    with tally(impatient) as counts, impatient.client() as client:
        for number in range(50):
            with connect(impatient) as raw:
                raw.sendall(head(len(BODY)) + BODY[: number % len(BODY)])
                counts.leave()
            if number % 5 == 0:
                counts.ask(client)
        assert counts.answered == 10


def test_a_body_that_does_not_come_is_408_and_holds_up_nobody(impatient) -> None:
    with tally(impatient) as counts, impatient.client() as client, connect(impatient) as raw:
        raw.sendall(head(len(BODY)) + BODY[:10])
        counts.ask(client)
        counts.note(read_status(raw))
        assert dict(counts.statuses) == {200: 1, 408: 1}
