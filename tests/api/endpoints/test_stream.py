"""POST /embeddings/stream: records are those of single requests, whatever else is beside them."""

import base64
import gzip
import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.conftest import answered, metric, serving
from tests.support.formats import ARROW, MSGPACK, READERS
from tests.support.streaming import NDJSON, Stream
from tests.support.texts import varied_texts

TEXTS = [*varied_texts(40), "search " * 40, ""]
BAD_LINE = 20
PATH = "/embeddings/stream"


def as_lines(texts) -> bytes:
    return b"".join(json.dumps(text).encode() + b"\n" for text in texts)


def ask(client, content: bytes, accept: str = NDJSON, **options) -> httpx2.Response:
    headers = {"Content-Type": NDJSON, "Accept": accept, "Accept-Encoding": "identity"}
    answer = client.post(PATH, content=content, params=options, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == accept
    return answer


def records(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def alone(client, text: str, **options) -> dict[str, Any]:
    """What a request of this text alone is answered."""
    (item,) = answered(client, "/embeddings/", sentences=[text], **options)["data"]
    return {name: item[name] for name in ("embeddings", "tokens") if name in item}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_dense": False, "sparse_as_indices": True, "return_tokens": True},
        {"output_dtype": "int8", "return_sparse": False},
        {"output_dtype": "float16", "encoding": "base64", "colbert_pool_factor": 2},
        {"muvera": "document", "return_colbert": False},
    ],
)
def test_each_record_is_that_of_a_request_of_its_own(client, options) -> None:
    texts = TEXTS[:12]
    found = records(ask(client, as_lines(texts), **options).content)
    assert [each["id"] for each in found] == list(range(len(texts)))
    for text, each in zip(texts, found, strict=True):
        expected = alone(client, text, **options)
        del each["id"]
        each.pop("warnings", None)
        close(each, expected)


def close(found: Any, expected: Any) -> None:
    """Equal but for the last bits of sums, which depend on the length of a batch."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        if "dtype" in expected:
            found, expected = {"": from_base64(found)}, {"": from_base64(expected)}
        for name, each in expected.items():
            close(found[name], each)
    elif isinstance(expected, str) or np.array(expected).dtype.kind == "U":
        assert found == expected
    elif expected is not None:
        found, expected = np.array(found), np.array(expected)
        step = 1 if expected.dtype.kind == "i" else 0.002 if expected.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(found, expected, atol=step)


def from_base64(array: dict[str, Any]) -> np.ndarray:
    raw = base64.b64decode(array["data"])
    return np.frombuffer(raw, array["dtype"]).reshape(array["shape"])


def test_a_line_gets_what_a_single_request_would_get_in_its_place(client) -> None:
    lines = as_lines(TEXTS).splitlines(keepends=True)
    lines.insert(BAD_LINE, b'{"text": 7}\n')
    found = records(ask(client, b"".join(lines)).content)
    assert [i for i, each in enumerate(found) if "error" in each] == [BAD_LINE]
    error = found[BAD_LINE]["error"]
    assert (error["status"], error["code"], error["line"]) == (422, "invalid_request", BAD_LINE + 1)
    long = "search " * 9000
    body = as_lines(["a", long, "b"])
    first, second, third = records(ask(client, body, truncate="false").content)
    single = client.post("/embeddings/", json={"sentences": [long], "truncate": False})
    expected = {name: single.json()[name] for name in ("code", "detail")}
    assert expected.items() <= second["error"].items()
    assert second["error"]["status"] == single.status_code
    assert "embeddings" in first
    assert "embeddings" in third
    first, second, _ = records(ask(client, body).content)
    assert "warnings" not in first
    (warning,) = second["warnings"]
    assert warning["target"] == {"field": "text", "index": 1, "pointer": "/text"}
    single = answered(client, "/embeddings/", sentences=[long])
    assert warning["details"] == single["warnings"][0]["details"]


def test_arrow_goes_in_and_out_with_the_ids_and_their_type(client) -> None:
    for ids in ([-1, -1, 7], ["x", "y", "z"]):
        table = pa.table({"id": ids, "text": ["a", None, "c"]})
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        headers = {"Content-Type": ARROW, "Accept": ARROW}
        answer = client.post(PATH, content=sink.getvalue(), headers=headers)
        found = pa.ipc.open_stream(answer.content).read_all()
        assert found["id"].to_pylist() == ids
        assert found["dense"].null_count == found["colbert"].null_count == 1
        assert "the field text is null" in found["error"][1].as_py().lower()
        assert b"output_dtype" in found.schema.metadata[b"smart-embedder"]


def test_a_stream_without_vectors_is_complete(client) -> None:
    """In the other formats: tests/api/formats/test_records.py."""
    columns = {"id", "dense", "sparse", "colbert", "muvera", "warnings", "error"}
    for body in (b"", b"\n\n", b"{}\n[]\n"):
        content = ask(client, body, ARROW, output_dtype="binary", muvera="query").content
        table = pa.ipc.open_stream(content).read_all()
        assert (len(table), {*table.column_names}) == (body.count(b"]") * 2, columns)
        assert len(records(ask(client, body).content)) == len(table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimension": 3}, "did you mean dimensions"),
        ({"dimensions": 3}, "was not trained for fewer"),
        ({"return_dense": "maybe"}, "return_dense"),
        (dict.fromkeys(("return_dense", "return_sparse", "return_colbert"), False), "Nothing is"),
        ({"output_dtype": "float16"}, "JSON has no numbers for"),
        ({"truncate": ["true", "false"]}, "The option truncate is given more than once"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_anything_is_read(client, options, message) -> None:
    answer = client.post(PATH, params=options, content=b'"a"', headers={"Content-Type": NDJSON})
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


EMPTY = gzip.compress(b"") * 2000


@pytest.mark.parametrize(
    ("headers", "content", "status", "code"),
    [
        ({"Content-Type": "application/json"}, b'"a"', 415, "unsupported_media_type"),
        ({}, b'"a"', 415, "unsupported_media_type"),
        ({"Content-Type": NDJSON, "Content-Encoding": "br"}, b"a", 415, "unsupported_media_type"),
        ({"Content-Type": ARROW}, b'"a"\n' * 9, 422, "invalid_request"),
        ({"Content-Type": NDJSON, "Content-Encoding": "gzip"}, EMPTY, 422, "invalid_request"),
    ],
    ids=["JSON", "no type", "Brotli", "no Arrow", "empty members of gzip without end"],
)
def test_other_bodies_are_refused(client, headers, content, status, code) -> None:
    answer = client.post(PATH, content=content, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert answer.headers.get("accept") == (NDJSON if status == 415 else None)
    assert answer.headers["connection"] == "close"


def test_a_record_arrives_while_the_body_is_sent(server) -> None:
    with Stream(server) as stream:
        for i in range(3):
            stream.send_texts(f"text {i}")
            assert stream.record()["id"] == i
        stream.end()
        assert stream.rest() == []


def test_a_gzipped_body_is_read_beyond_the_limit_of_other_bodies(tiny_m3) -> None:
    """And a line beyond it is an error in its place."""
    with serving(embedding_model=str(tiny_m3), max_body_bytes=2000) as client:
        texts = ["search vector " * 20] * 40
        texts[7] = "x" * 3000
        headers = {"Content-Type": NDJSON, "Content-Encoding": "gzip"}
        packed = gzip.compress(as_lines(texts))
        found = records(client.post(PATH, content=packed, headers=headers).content)
        assert [i for i, each in enumerate(found) if "error" in each] == [7]
        assert (found[7]["error"]["status"], found[7]["error"]["code"]) == (413, "body_too_large")
        broken = records(client.post(PATH, content=packed[:-12], headers=headers).content)
        assert "id" not in broken[-1]
        assert broken[-1]["error"]["code"] == "invalid_request"
        assert [each["id"] for each in broken[:-1]] == list(range(len(broken) - 1))


@settings(max_examples=15)
@given(
    texts=st.lists(st.sampled_from(TEXTS), max_size=30),
    others=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=5),
)
def test_streams_and_requests_beside_each_other_change_nothing(client, texts, others) -> None:
    def counts() -> list[float]:
        requests = metric(client, "embedding_requests_total", endpoint=PATH, status="success")
        return [requests, metric(client, "embedding_sentences_processed_total")]

    options, before = {"return_colbert": False}, counts()
    with ThreadPoolExecutor(3) as threads:
        streams = [threads.submit(ask, client, as_lines(texts), **options) for _ in range(2)]
        single = answered(client, "/embeddings/", sentences=others, **options)
        answers = [records(each.result().content) for each in streams]
    counted = [2, 2 * len(texts) + len(others)]
    assert counts() == [then + more for then, more in zip(before, counted, strict=True)]
    expected = {text: alone(client, text, **options)["embeddings"] for text in {*texts, *others}}
    for asked, found in ((texts, answers[0]), (texts, answers[1]), (others, single["data"])):
        for text, each in zip(asked, found, strict=True):
            close(each["embeddings"], expected[text])


def test_pieces_wait_for_those_before_them_where_an_answer_may_hold_little(tiny_m3) -> None:
    """Two lines have room beside each other, and one line has none at all."""
    texts = ["search vector dense " * 40] * 30
    texts[7] = "search vector dense " * 200
    with serving(embedding_model=str(tiny_m3), max_answer_bytes=80_000) as client:
        for accept in (NDJSON, MSGPACK):
            found = READERS[accept](ask(client, as_lines(texts), accept).content)
            assert [each["id"] for each in found] == list(range(30))
            assert [each["id"] for each in found if "error" in each] == [7]
            assert "MAX_ANSWER_BYTES" in found[7]["error"]["detail"]
