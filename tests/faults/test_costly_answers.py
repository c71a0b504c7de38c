"""No answer costs more memory than 20 times its request and 50 MiB, whatever its format."""

import json
import sys
from collections.abc import Iterator

import pytest

from tests.faults.tally import EMBED
from tests.support.memory import forget_peak, status_bytes
from tests.support.server import RunningServer

WORDS = "search vector weight dense token "
# 9,000 tokens, of which models read 8,192.
LONG = WORDS * 1800
MANY = [f"{number} {WORDS * 90}" for number in range(500)]
SHORT = [f"{number}" for number in range(1024)]
LIGATURES = "ﷺ" * 150_000
ALLOWED_FACTOR, ALLOWED = 20, 50 * 2**20

CASES = {
    "tokens of ligatures": ("/tokenize", {"inputs": LIGATURES}, {}, 422),
    "long numbers": ("/embeddings/", {"sentences": SHORT, "muvera": "document"}, {}, 200),
    "bytes": ("/embeddings/", {"sentences": MANY}, {"Accept": "application/vnd.safetensors"}, 422),
    "OpenAI's": ("/v1/embeddings", {"input": MANY, "return_colbert": True}, {}, 400),
    "pooled": ("/embeddings/", {"sentences": [LONG], "colbert_pool_factor": 2}, {}, 422),
    "two long texts": ("/rerank", {"query": LONG, "passages": [LONG]}, {}, 200),
}


@pytest.fixture(scope="module")
def server(serve) -> Iterator[RunningServer]:
    """One with the default limits, which has seen a text of full length."""
    with serve() as running:
        with running.client() as client:
            for body in (EMBED[1], {"sentences": [LONG]}):
                assert client.post("/embeddings/", json=body).status_code == 200
        yield running


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("case", CASES)
def test_an_answer_costs_at_most_20_times_its_request(server: RunningServer, case: str) -> None:
    """Sent 6: answered 2, refused 4 before they were made, lost 0."""
    path, body, headers, status = CASES[case]
    content = json.dumps(body, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"} | headers
    pid = server.process.pid
    before = status_bytes(pid, "VmRSS")
    forget_peak(pid)
    with (
        server.client() as client,
        client.stream("POST", path, content=content, headers=headers) as answer,
    ):
        size = sum(map(len, answer.iter_raw()))
    grown = status_bytes(pid, "VmHWM") - before
    assert grown <= ALLOWED_FACTOR * len(content) + ALLOWED
    assert answer.status_code == status
    assert (size > 1000) == (status == 200)
