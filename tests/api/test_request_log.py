"""One line for each request, with its outcome, and never a text or a token."""

from pathlib import Path

from structlog.testing import capture_logs

from tests.engine.fakes import FakeModel, FakeReranker, loaded
from tests.support.in_process import served

SECRET = "zebra"
EMBED = {"sentences": [f"{SECRET} one", f"{SECRET} two"], "return_colbert": False}
RERANK = {"query": SECRET, "passages": [SECRET] * 3}
MOST_BYTES = 10_000
WORK = {"tokens", "tokenize_ms", "queue_ms", "inference_ms"}
OWN = {"Authorization": "Bearer hush-hush"}


async def test_a_line_tells_all_numbers_and_no_text(tmp_path: Path) -> None:
    (tokens := tmp_path / "tokens").write_text("alice:hush-named\n")
    settings = {"api_token": "hush-hush", "api_tokens_file": tokens, "max_body_bytes": MOST_BYTES}
    models = loaded(FakeModel(), 100, FakeReranker())
    async with served(models, **settings) as (_, client):
        with capture_logs() as lines:
            for path, body, headers in (
                ("/embeddings/?q=zebra", EMBED, OWN | {"X-Request-ID": "first"}),
                ("/rerank", RERANK, {"Authorization": "Bearer hush-named"}),
                ("/embeddings/", {"sentences": [SECRET, 1], SECRET: 1}, OWN),
                ("/rerank", RERANK, {"Authorization": "Bearer zebra-token"}),
                ("/nowhere%0A%1B%5B2J/" + "x" * 300, RERANK, OWN),
                ("/rerank", {SECRET: "x" * MOST_BYTES}, OWN),
            ):
                await client.post(path, json=body, headers=headers)
            await client.get("/rerank?q=zebra", headers=OWN)
    assert not any(SECRET in str(line) or "hush" in str(line) for line in lines)
    requests = [line for line in lines if line["event"] == "request"]
    embed, rerank, invalid, refused, unknown, too_large, wrong_method = requests
    assert embed.keys() >= WORK | {"sentences"}
    told = [embed[name] for name in ("request_id", "route", "client", "status", "sentences")]
    assert told == ["first", "/embeddings/", "default", 200, 2]
    assert embed["bytes_in"] > 50
    assert embed["bytes_out"] > 100
    assert embed["ms"] >= embed["inference_ms"] > 0
    assert (rerank["client"], rerank["passages"]) == ("alice", 3)
    assert (invalid["status"], invalid["code"]) == (422, "invalid_request")
    assert (refused["status"], refused["client"], refused["bytes_in"]) == (401, None, 0)
    # Who guesses tokens, too.
    assert {event["client_address"] for event in requests} == {"127.0.0.1"}
    assert (unknown["status"], unknown["route"]) == (404, None)
    assert unknown["path"] == r"/nowhere\n\x1b[2J/" + "x" * 186
    assert (wrong_method["method"], wrong_method["status"]) == ("GET", 405)
    assert wrong_method["code"] == "method_not_allowed"
    assert (too_large["status"], too_large["route"]) == (413, None)
    assert [event["path"] for event in requests[:4]] == ["/embeddings/", "/rerank"] * 2
