"""Too little memory outside the model: 503 for the request that met it, and for no other.

Sent 8: 5 answered, 3 refused (503 out_of_memory), 0 lost. Healthy before and after.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.tally import tally
from tests.support.server import RunningServer, run_server

STAGES = ("parsing", "tokenising", "rendering")


def ask(server: RunningServer, text: str):
    with server.client() as client:
        return client.post("/embeddings/", json={"sentences": [text], "return_colbert": False})


def test_a_stage_that_finds_no_memory_costs_its_own_request(tiny_m3: Path, tmp_path: Path) -> None:
    module = "tests.faults.forgetful_server"
    with run_server(tmp_path, module, EMBEDDING_MODEL=str(tiny_m3)) as server:
        server.wait_until_healthy()
        with tally(server) as counts, ThreadPoolExecutor(8) as threads:
            texts = [*STAGES, *(f"text {n}" for n in range(5))]
            answers = list(threads.map(lambda text: ask(server, text), texts))
            for answer in answers:
                counts.note(answer.status_code)
        for answer in answers[:3]:
            assert (answer.status_code, answer.json()["code"]) == (503, "out_of_memory")
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["request_id"] == answer.headers["x-request-id"]
        assert [answer.status_code for answer in answers[3:]] == [200] * 5
        series = 'embedding_requests_total{endpoint="/embeddings/",status="error"}'
        assert server.metric(series) == 3
        assert server.log.count("request_out_of_memory") == 3
        assert "Traceback" not in server.log
