"""A log of one service is repeated against another: equal, near, far, elsewhere, or refused."""

import base64
import gzip
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.api.conftest import serving
from tests.support.answering_http import answering
from tests.support.formats import ARROW, MSGPACK, SAFETENSORS
from tests.support.printed import run_printed
from tools.replay.__main__ import lines_of, main
from tools.replay.numbers import numbers_of

TEXTS = ["hybrid search", "Öltank"]
NATIVE = {"sentences": TEXTS}
RERANK = {"query": TEXTS[0], "passages": TEXTS}
WORK: list[tuple[str, dict[str, Any], str | None]] = [
    ("/embeddings/", NATIVE, None),
    *(("/embeddings", NATIVE, each) for each in (ARROW, MSGPACK, SAFETENSORS)),
    ("/embeddings/", NATIVE | {"encoding": "base64", "sparse_as_indices": True}, None),
    *(
        ("/embeddings/", NATIVE | {"output_dtype": dtype}, accept)
        for dtype, accept in (("int8", None), ("binary", None), ("ubinary", ARROW))
    ),
    *(
        ("/embeddings/", NATIVE | {"output_dtype": "bfloat16"}, accept)
        for accept in (ARROW, MSGPACK, SAFETENSORS)
    ),
    ("/embeddings/", NATIVE | {"muvera": "query", "return_tokens": True}, None),
    ("/embeddings/", {"input": TEXTS}, None),
    ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64"}, None),
    ("/v1/embeddings", {"input": TEXTS, "encoding_format": "base64", "output_dtype": "int8"}, None),
    ("/v2/embed", {"texts": TEXTS, "input_type": "classification"}, None),
    ("/v2/embed", {"texts": TEXTS, "input_type": "classification",
                   "embedding_types": ["float", "base64", "int8", "binary"]}, None),
    ("/embed", {"inputs": TEXTS}, None),
    ("/embed_sparse", {"inputs": TEXTS}, None),
    ("/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}}, None),
    ("/api/v1/embed", {"inputs": TEXTS}, None),
    ("/rerank", RERANK, None),
    ("/rerank", {"query": TEXTS[0], "texts": TEXTS}, None),
    ("/rerank", {"query": TEXTS[0], "documents": TEXTS}, None),
    ("/v2/rerank", {"query": TEXTS[0], "documents": TEXTS}, None),
    ("/score", {"text_1": TEXTS[0], "text_2": TEXTS}, None),
]  # fmt: skip
REFUSED = [b"no JSON", b"\xff", b'{"sentences": []}', b"{" * 100, b'{"a": 1}']


@pytest.fixture(scope="module")
def log(tiny_m3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a service like `server`, which had these requests, some at once, and refused others."""
    path = tmp_path_factory.mktemp("log") / "replay.jsonl"

    def post(work: tuple[str, dict[str, Any], str | None]) -> int:
        where, body, accept = work
        headers = {"accept": accept or "*/*", "content-type": "application/json"}
        headers |= {"authorization": "Bearer some-long-token"}
        content = json.dumps(body).encode()
        if accept is None:
            content, headers = gzip.compress(content), headers | {"content-encoding": "gzip"}
        return client.post(where, content=content, headers=headers).status_code

    settings = {"bge_embed_max_length": 2048, "replay_log": path}
    with serving(embedding_model=str(tiny_m3), **settings) as client:
        with ThreadPoolExecutor(4) as threads:
            assert {*threads.map(post, WORK)} == {200}
        for body in REFUSED:
            headers = {"content-type": "application/json"}
            answer = client.post("/embeddings/", content=body, headers=headers)
            assert answer.status_code in {400, 422}
        lines = {"content-type": "application/x-ndjson"}
        assert client.post("/embeddings/stream", content='{"text": "a"}', headers=lines).is_success
    assert "some-long-token" not in path.read_text()
    return path


def replay(path: Path, url: str) -> tuple[int, str]:
    return run_printed(main, str(path), "--url", url)


def counts(output: str) -> dict[str, int]:
    """How many of each outcome, without those of which there is none."""
    found = re.findall(r"^ *(\d+) (.+)$", output, re.MULTILINE)
    return {outcome: int(count) for count, outcome in found if int(count)}


def test_a_server_of_the_same_model_answers_equally_in_every_dialect_and_format(log, server):
    status, output = replay(log, server.url)
    assert counts(output) == {"equal to the last bit": len(WORK)}, output
    assert status == 0


def changed(line: dict[str, Any], change: Any) -> None:
    """Change the numbers of vectors in a logged answer of JSON."""
    answer = line["answer"]
    packed = b"".join(map(base64.b64decode, answer["data"]))
    tree = json.loads(gzip.decompress(packed))
    for each in tree["data"]:
        each["embeddings"]["dense"] = [*map(change, each["embeddings"]["dense"])]
    answer["data"] = [base64.b64encode(gzip.compress(json.dumps(tree).encode())).decode()]


def only_the_first(log: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """A log of one native request, whose line is changed."""
    lines = [json.loads(each) for each in log.read_text().splitlines()]
    line = next(
        each for each in lines if each["body"] == json.dumps(NATIVE)
        and each["answer"]["type"] == "application/json"
    )  # fmt: skip
    edit(line)
    path = tmp_path / "edited.jsonl"
    path.write_text(json.dumps(line))
    return path


@pytest.mark.parametrize(
    ("edit", "status", "outcome", "told"),
    [
        (lambda x: x * (1 + 1e-6), 0, "different, as near as rounding explains", "dense: distance"),
        (lambda x: x * 1.1, 1, "different, farther than that", r"farthest: \w+ \(dense 4.5e-03\)"),
        (lambda _: float("nan"), 1, "different, farther than that", "nan"),
    ],
)
def test_numbers_that_differ_are_told_with_their_distance(
    log, server, tmp_path, edit, status, outcome, told
) -> None:
    path = only_the_first(log, tmp_path, lambda line: changed(line, edit))
    found, output = replay(path, server.url)
    assert (found, counts(output)) == (status, {outcome: 1}), output
    assert re.search(told, output), output


@pytest.mark.parametrize("names_its_space", [False, True])
def test_another_space_is_told_with_what_differs(log, server, tmp_path, names_its_space) -> None:
    def by_another_pooling(line: dict[str, Any]) -> None:
        other = line["vector_space"]["dense"].replace("cls", "mean")
        if names_its_space:  # Then the server refuses it, and says why.
            line["headers"]["if-vector-space"] = other
        else:
            line["vector_space"]["dense"] = other

    status, output = replay(only_the_first(log, tmp_path, by_another_pooling), server.url)
    assert (status, counts(output)) == (1, {"of another vector space": 1}), output
    assert "dense: pooling: cls, was mean" in output


def test_refused_requests_are_counted_with_the_reason(log, server, tmp_path) -> None:
    path = only_the_first(log, tmp_path, lambda line: line.update(path="/nowhere"))
    status, output = replay(path, server.url)
    assert (status, counts(output)) == (2, {"refused": 1}), output
    assert re.search(r"refused: 404 .* \(1 times\)", output), output
    status, output = replay(path, "http://127.0.0.1:9")
    assert "refused: no answer: ConnectError (1 times)" in output


def test_lines_that_cannot_be_used_are_counted_by_reason(tmp_path: Path) -> None:
    line = {"left_out": {}, "request_id": "a"}
    (path := tmp_path / "log").write_text(
        "\n".join(
            ["no JSON", "[1]", "{}", json.dumps(line), ""]
            + [json.dumps(line | {"left_out": {part: "size"}}) for part in ("body", "answer")]
        )
    )
    status, output = replay(path, "http://127.0.0.1:9")
    assert (status, counts(output)) == (2, {"lines that could not be used": 6})
    assert output.count("it is no line of REPLAY_LOG (3 times)") == 1
    assert "its body was left out for its size (1 times)" in output
    status, output = replay(tmp_path / "none", "http://127.0.0.1:9")
    assert (status, output.count("\n")) == (2, 1)
    assert "No such file" in output


def test_what_the_server_writes_to_the_log_meanwhile_is_not_repeated(tmp_path: Path) -> None:
    (path := tmp_path / "log").write_text("one\ntwo\n")
    lines = lines_of(path)
    assert next(lines) == "one\n"
    with path.open("a") as log:
        log.write("three\n")
    assert [*lines] == ["two\n"]


def test_a_server_of_others_is_compared_by_its_numbers(log, tmp_path) -> None:
    rows = np.eye(2, 8).tolist()
    told = {"data": [{"index": i, "embedding": row} for i, row in enumerate(rows)]}

    def become_theirs(line: dict[str, Any]) -> None:
        packed = base64.b64encode(gzip.compress(json.dumps(told).encode())).decode()
        line |= {"path": "/v1/embeddings", "body": json.dumps({"input": TEXTS}), "headers": {}}
        line["vector_space"] = {"dense": line["vector_space"]["dense"]}
        line["answer"] = {"type": "application/json", "encoding": "gzip", "data": [packed]}

    path = only_the_first(log, tmp_path, become_theirs)
    for change, status, outcome in ((0, 0, "equal"), (1e-3, 0, "as near as"), (1, 1, "farther")):
        told["data"][0]["embedding"][3] = change
        with answering({"/v1/embeddings": told}) as url:
            found, output = replay(path, url)
        assert found == status, output
        assert outcome in "".join(counts(output)), output


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (b"", "application/json"),
        (b"{}", "application/json"),
        (b'{"embedding": "_"}', "application/json"),
        (b'{"embedding": {"dtype": "float99", "shape": [1], "data": "AAAA"}}', "application/json"),
        (b"\x81", MSGPACK),
        (b"\x08", SAFETENSORS),
        (b"ARROW", ARROW),
    ],
)
def test_an_answer_that_is_none_has_no_numbers(content: bytes, media_type: str) -> None:
    with pytest.raises(ValueError, match="cannot be read|has no vectors"):
        numbers_of(content, media_type, "dense", "float32")
