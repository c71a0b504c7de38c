"""One line for each request, with its outcome, and never a text or a token."""

import json
from pathlib import Path

from tests.support.server import run_server

SECRET = "zebra"
EMBED = {"sentences": [f"{SECRET} one", f"{SECRET} two"], "return_colbert": False}
RERANK = {"query": SECRET, "passages": [SECRET] * 3}
MOST_BYTES = 10_000
WORK = {"tokens", "tokenize_ms", "queue_ms", "inference_ms"}
LINE = {"request_id", "method", "path", "route", "client", "client_address", "status", "code", "ms"}
LINE |= {"bytes_in", "bytes_out"}


def serve_requests(folder: Path, model: Path, **settings: str) -> list[str]:
    """The log of a server after seven requests."""
    headers = {"Authorization": "Bearer hush-hush"}
    settings |= {"EMBEDDING_MODEL": str(model), "API_TOKEN": "hush-hush", "LOG_LEVEL": "debug"}
    settings["MAX_BODY_BYTES"] = str(MOST_BYTES)
    (folder / "tokens").write_text("alice:hush-named\n")
    settings["API_TOKENS_FILE"] = str(folder / "tokens")
    with run_server(folder, **settings) as server, server.client() as client:
        server.wait_until_healthy()
        client.post("/embeddings/?q=zebra", json=EMBED, headers=headers | {"X-Request-ID": "first"})
        client.post("/rerank", json=RERANK, headers={"Authorization": "Bearer hush-named"})
        client.post("/embeddings/", json={"sentences": [SECRET, 1], SECRET: 1}, headers=headers)
        client.post("/rerank", json=RERANK, headers={"Authorization": "Bearer zebra-token"})
        client.post("/nowhere%0A%1B%5B2J/" + "x" * 300, json=RERANK, headers=headers)
        client.get("/rerank?q=zebra", headers=headers)
        client.post("/rerank", content=b"x" * (MOST_BYTES + 1), headers=headers)
        server.stop()
        return server.lines


def test_a_line_as_json_tells_all_numbers_and_no_text(tiny_m3: Path, tmp_path: Path) -> None:
    lines = serve_requests(tmp_path, tiny_m3, LOG_FORMAT="json")
    assert not any(SECRET in line or "hush" in line for line in lines)
    events = [json.loads(line) for line in lines if line.startswith("{")]
    # Checks of its health are shown only for debugging.
    requests = [e for e in events if e["event"] == "request" and e["path"] != "/health"]
    assert all(event.keys() >= LINE for event in requests)
    embed, rerank, invalid, refused, unknown, wrong_method, too_large = requests
    assert embed.keys() >= WORK | {"sentences"}
    assert (embed["request_id"], embed["route"], embed["client"]) == (
        "first",
        "/embeddings/",
        "default",
    )
    assert (embed["status"], embed["sentences"]) == (200, 2)
    assert embed["bytes_in"] > 50
    assert embed["bytes_out"] > 1000
    assert embed["ms"] >= embed["inference_ms"] > 0
    assert (rerank["client"], rerank["passages"]) == ("alice", 3)
    assert (invalid["status"], invalid["code"]) == (422, "invalid_request")
    assert (refused["status"], refused["client"], refused["bytes_in"]) == (401, None, 0)
    # Who guesses tokens, too.
    assert {event["client_address"] for event in requests} == {"127.0.0.1"}
    assert (unknown["status"], unknown["route"]) == (404, None)
    assert unknown["path"] == r"/nowhere\n\x1b[2J/" + "x" * 186
    assert (wrong_method["method"], wrong_method["path"]) == ("GET", "/rerank")
    assert (wrong_method["status"], wrong_method["code"]) == (405, "method_not_allowed")
    assert (too_large["status"], too_large["path"]) == (413, "/rerank")
    assert {event["path"] for event in (rerank, refused)} == {"/rerank"}
    assert {event["path"] for event in (embed, invalid)} == {"/embeddings/"}
