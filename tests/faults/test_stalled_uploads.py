"""Uploads that stall cost nobody else anything, and are told so.

Sixteen that stop before their last byte, beside ten clients that behave: sent 56, answered 40,
refused 16 (408, or 503 where one client's bodies were too many), lost 0.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from tests.faults.raw import connect, head, read_answers
from tests.faults.tally import tally

BODY = json.dumps({"sentences": ["search"], "padding": " " * 990_000}).encode()
UPLOADS = 16
CLIENTS = 10


def test_sixteen_stalled_uploads_cost_nobody_else_anything(impatient) -> None:
    def behave() -> None:
        with impatient.client() as client:
            for _ in range(4):
                answer = counts.ask(client)
                assert answer is not None
                assert answer.status_code == 200, answer.text

    with tally(impatient) as counts, ExitStack() as stack, ThreadPoolExecutor(CLIENTS) as clients:
        stalled = [stack.enter_context(connect(impatient)) for _ in range(UPLOADS)]
        for raw in stalled:
            raw.sendall(head(len(BODY)) + BODY[:-1])
        for done in [clients.submit(behave) for _ in range(CLIENTS)]:
            done.result()
        for raw in stalled:
            status, body = next(read_answers(raw))
            counts.note(status)
            assert (status, json.loads(body)["code"]) in {
                (408, "request_timeout"),
                (503, "queue_full"),
            }
        assert counts.statuses[408] >= UPLOADS // 2
        assert counts.answered == 4 * CLIENTS


def test_a_body_that_trickles_is_408_and_the_connection_ends(impatient) -> None:
    with tally(impatient) as counts, connect(impatient) as raw:
        raw.sendall(head(1000))
        raw.settimeout(0.05)
        answer = b""
        while not answer:
            raw.sendall(b" ")
            try:
                answer = raw.recv(65_536)
            except TimeoutError:
                continue
        raw.settimeout(60)
        while part := raw.recv(65_536):
            answer += part
        counts.note(int(answer.split()[1]))
        assert b"connection: close" in answer.lower()
        assert b'"code":"request_timeout"' in answer
        assert dict(counts.statuses) == {408: 1}
