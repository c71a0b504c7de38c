"""HEAD, trailing slashes, unknown paths, wrong methods, content types and malformed bodies."""

import pytest

from smart_embedder import __version__

BODY = b'{"sentences": ["search"], "return_colbert": false}'
READ = ["/", "/health", "/health/live", "/health/ready", "/stats", "/metrics", "/openapi.json"]
READ += ["/docs", "/redoc"]
JSON = {"Content-Type": "application/json"}


def assert_refused(answer, status: int, code: str) -> str:
    """Check the three fields of every error body; return its sentence."""
    body = answer.json()
    assert (answer.status_code, body["code"]) == (status, code)
    assert body["request_id"] == answer.headers["x-request-id"]
    detail: str = body["detail"]
    assert detail.endswith(".")
    assert "Traceback" not in answer.text
    return detail


def test_head_is_answered_like_get_and_a_trailing_slash_changes_nothing(client) -> None:
    for path in READ:
        get = client.get(path)
        assert get.status_code == 200
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert client.get(f"{path}//").status_code == 200


def test_the_root_names_the_service_its_version_and_where_to_look(client) -> None:
    answer = client.get("/").json()
    assert (answer["service"], answer["version"]) == ("Smart Embedder", __version__)
    paths = answer["paths"]
    for work in (paths.pop(name) for name in ("embeddings", "rerank", "extract")):
        assert client.post(work, json={}).status_code == 422
    assert {"documentation", "health"} <= set(paths)
    assert all(client.get(path).status_code == 200 for path in paths.values())


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/embed%0Adings?q=1", "POST /embeddings/"),
        ("/Embedings", "POST /embeddings/"),
        ("/models/BAAI/bge-m3/tokenise", "POST /models/{model}/tokenize"),
        ("/nowhere", None),
        ("/" + "embeddings" * 6000, None),
    ],
)
def test_404_names_the_nearest_path(client, path, nearest) -> None:
    answer = client.get(path).json()
    detail = answer.get("detail") or answer.get("error")
    advice = f"did you mean {nearest}? " if nearest else ""
    assert detail.endswith(f" here: {advice}/docs lists every path.")
    assert detail.startswith("There is no ")
    assert len(detail) < 300


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/embeddings", "POST"),
        ("OPTIONS", "/rerank/", "POST"),
        ("POST", "/health/", "GET, HEAD"),
        ("DELETE", "/", "GET, HEAD, POST"),
        ("POST", "/models/BAAI/bge-m3/info", "GET, HEAD"),
        ("PUT", "/v1/models/one/load", "GET, HEAD, POST"),
        ("POST", "/static/docs/swagger-ui.css", "GET, HEAD"),
    ],
)
def test_405_names_the_allowed_methods(client, method, path, allowed) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    assert f"but {allowed}" in answer.text
    if "error" not in answer.json():  # The shape of another dialect.
        assert_refused(answer, 405, "method_not_allowed")


def test_another_content_type_or_encoding_is_415(client) -> None:
    """test_body.py covers other types."""
    for headers, message in (
        ({"Content-Type": "text/plain"}, "text/plain"),
        (JSON | {"Content-Encoding": "gzip"}, "Content-Encoding"),
    ):
        answer = client.post("/embeddings/", content=BODY, headers=headers)
        assert message in assert_refused(answer, 415, "unsupported_media_type")
        assert answer.headers["accept"] == "application/json"
        assert answer.headers["accept-encoding"] == "identity"


def test_a_malformed_body_is_422_and_quotes_no_text(client) -> None:
    """test_error_responses.py and test_body.py cover the messages."""
    for body in (
        *(b"", b"not json", b"{", b"null", b"[]", b'"text"', b"{}", b'{"sentences": ["\xff\xfe"]}'),
        *(b'{"sentences": null}', b'{"sentences": ["a"]} trailing'),
        *(b"[" * 100_000, b'{"sentences": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ):
        answer = client.post("/embeddings/", content=body, headers=JSON)
        assert_refused(answer, 422, "invalid_request")
        assert answer.json()["errors"]
    body = {"sentences": ["secret words", 7], "sur/pr~ise": "more secret words"}
    answer = client.post("/embeddings/", json=body)
    assert_refused(answer, 422, "invalid_request")
    pointers = [item["pointer"] for item in answer.json()["errors"]]
    assert pointers == ["/sentences/1", "/sur~1pr~0ise"]
    assert "secret" not in answer.text
    assert client.post("/embeddings/", content=BODY, headers=JSON).status_code == 200
