"""What HTTP clients and browsers expect beside the work: HEAD, slashes, types, origins, errors."""

import http.client
import re

import orjson
import pytest

from smart_embedder import __version__
from tests.faults.raw import connect, head, read_status
from tests.support.server import RunningServer

BODY = b'{"sentences": ["search"], "return_colbert": false}'
READ = ["/", "/health", "/health/live", "/health/ready", "/stats", "/metrics", "/openapi.json"]
READ += ["/docs", "/redoc"]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with server.client() as client:
        yield client


def post(client, **headers: str):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post("/embeddings/", content=BODY, headers=named)


def assert_refused(answer, status: int, code: str) -> str:
    """Every error body has the same three fields; gives its sentence."""
    body = answer.json()
    assert (answer.status_code, body["code"]) == (status, code)
    assert body["request_id"] == answer.headers["x-request-id"]
    detail: str = body["detail"]
    assert detail.endswith(".")
    return detail


@pytest.mark.parametrize("path", READ)
def test_head_is_answered_like_get_without_a_body(client, path: str) -> None:
    get, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("path", READ[1:])
def test_a_slash_at_the_end_changes_nothing(client, path: str) -> None:
    for spelling in (f"{path}/", f"{path}//"):
        assert client.get(spelling).status_code == 200
        assert client.head(spelling).status_code == 200


@pytest.mark.parametrize(
    "path", ["/embeddings", "/embeddings/", "/embeddings//", "/embeddings/%0A"]
)
def test_every_spelling_of_an_endpoint_is_the_same_endpoint(client, path: str) -> None:
    assert client.post(path, content=BODY, headers=JSON).status_code == 200


def test_the_root_names_the_service_its_version_and_where_to_look(client) -> None:
    answer = client.get("/").json()
    assert (answer["service"], answer["version"]) == ("Smart Embedder", __version__)
    reading = {name: path for name, path in answer["paths"].items() if name not in WORK}
    assert {"documentation", "health"} <= set(reading)
    assert all(client.get(path).status_code == 200 for path in reading.values())
    for name in WORK:
        assert client.post(answer["paths"][name], json={}).status_code == 422


WORK = ("embeddings", "rerank")


def test_an_unknown_path_is_told_the_known_ones(client) -> None:
    detail = assert_refused(client.get("/embed%0Adings?q=1"), 404, "not_found")
    assert detail.startswith("There is no /embed\\ndings here")
    for known in ("POST /embeddings/", "POST /rerank", "GET /health", "GET /docs"):
        assert known in detail


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/embeddings", "POST"),
        ("HEAD", "/rerank", "POST"),
        ("OPTIONS", "/rerank/", "POST"),
        ("POST", "/health/", "GET, HEAD"),
        ("DELETE", "/", "POST, GET, HEAD"),
        ("POST", "/docs", "GET, HEAD"),
    ],
)
def test_a_wrong_method_is_told_the_allowed_ones(client, method, path, allowed) -> None:
    answer = client.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == allowed
    if method != "HEAD":
        assert allowed in assert_refused(answer, 405, "method_not_allowed")


@pytest.mark.parametrize(
    "kind",
    [
        "application/json",
        "Application/JSON; charset=UTF-8",
        'application/json;charset="utf-8"',
        "application/vnd.example+json",
        "application/json; profile=x",
    ],
)
def test_a_body_that_says_it_is_json_is_read(client, kind: str) -> None:
    assert post(client, Content_Type=kind).status_code == 200


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("text/plain", "text/plain"),
        ("text/plain; application/json", "text/plain"),
        ("application/x-www-form-urlencoded", "x-www-form-urlencoded"),
        ("multipart/form-data; boundary=x", "multipart/form-data"),
        ("application/jsonp", "application/jsonp"),
        ("application/json, text/plain", "application/json, text/plain"),
        ("application/json; charset=utf-16", "utf-16"),
        ("application/json; charset=latin-1", "latin-1"),
        ("json", "json"),
    ],
)
def test_any_other_type_is_415_and_told_which_one_is_read(client, kind: str, said: str) -> None:
    answer = post(client, Content_Type=kind)
    assert said in assert_refused(answer, 415, "unsupported_media_type")
    assert answer.headers["accept"] == "application/json"


def test_a_body_without_a_type_is_json_where_no_web_page_sends_it(client) -> None:
    assert post(client).status_code == 200
    assert post(client, Content_Type="").status_code == 200


@pytest.mark.parametrize("kind", [{}, {"Content_Type": ""}])
def test_a_web_pages_body_without_a_type_is_415(client, kind) -> None:
    answer = post(client, Origin=str(client.base_url), **kind)
    detail = assert_refused(answer, 415, "unsupported_media_type")
    assert detail == (
        "The request has no Content-Type: send JSON, with Content-Type: application/json."
    )


def test_two_types_are_415(client) -> None:
    headers = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    answer = client.post("/embeddings/", content=BODY, headers=headers)
    assert_refused(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize("encoding", ["deflate", "br", "gzip, gzip", "zstd"])
def test_a_compressed_body_is_415(client, encoding: str) -> None:
    answer = post(client, Content_Type="application/json", Content_Encoding=encoding)
    assert "Content-Encoding" in assert_refused(answer, 415, "unsupported_media_type")
    assert answer.headers["accept-encoding"] == "gzip, identity"


def test_an_encoding_that_is_none_is_read(client) -> None:
    plain = post(client, Content_Type="application/json", Content_Encoding="Identity")
    assert plain.status_code == 200


def test_reading_asks_for_no_type(client) -> None:
    assert client.get("/health", headers={"Content-Type": "text/plain"}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://127.0.0.1:1", "null", "http://localhost", "nonsense"]
)
def test_a_page_from_elsewhere_is_refused_and_counted(client, origin: str) -> None:
    rejected = client.get("/stats").json()["rejected_requests"]
    detail = assert_refused(
        post(client, Content_Type="application/json", Origin=origin), 403, "foreign_origin"
    )
    assert origin in detail
    assert "CORS_ORIGINS" in detail
    assert client.get("/stats").json()["rejected_requests"] == rejected + 1
    assert client.get("/health", headers={"Origin": origin}).status_code == 403


def test_our_own_pages_and_other_clients_may_ask(server: RunningServer, client) -> None:
    """The page may have come through a proxy that ends TLS, or that writes another Host."""
    own = server.url
    proxied = {"Host": "embed.example", "Origin": "https://embed.example"}
    rewritten = {"Origin": "https://embed.example", "Sec-Fetch-Site": "same-origin"}
    for headers in ({}, {"Origin": own}, proxied, rewritten):
        answer = client.post("/embeddings/", content=BODY, headers=JSON | headers)
        assert answer.status_code == 200, headers


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_large_answer_is_whole_in_every_version_of_http(server, client, version: str) -> None:
    texts = [str(number) for number in range(100)]
    body = orjson.dumps({"sentences": texts, "muvera": "query"})
    with connect(server) as raw:
        start, *headers = head(len(body)).split(b"\r\n")
        start = start.replace(b"HTTP/1.1", f"HTTP/{version}".encode())
        raw.sendall(b"\r\n".join([start, b"Connection: close", *headers]) + body)
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        content = answer.read()
    assert len(content) > 4 << 20
    assert (answer.getheader("content-length") is None) == (version == "1.1")
    data = orjson.loads(content)["data"]
    assert [len(each["embeddings"]["muvera"]) for each in data] == [10_240] * 100


def test_a_large_answer_whose_client_leaves_is_not_rendered_on(server) -> None:
    texts = [str(number) for number in range(1024)]
    body = orjson.dumps({"sentences": texts, "muvera": "query"})
    lines = len(server.lines)
    with connect(server, receive_buffer=4096) as raw:
        raw.sendall(head(len(body)) + body)
        assert read_status(raw) == 200
    server._wait(lambda: "bytes_out" in "".join(server.lines[lines:]), "it was never logged")
    (line,) = (each for each in server.lines[lines:] if "bytes_out" in each)
    assert int(re.search(r"bytes_out\W+(\d+)", line)[1]) < 16 << 20
