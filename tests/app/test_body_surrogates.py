"""Lone surrogates in requests are read as U+FFFD, with a warning in responses that have them."""

import pytest

CUT, READ = "cut \\ud83d", "cut \\ufffd"

NUMBERS = ("data", "embeddings", "embedding", "results", "model", "outputs", "items")


def post(client, path: str, body: str):
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text
    return response.json()


def without_times(answer):
    """The parts of a response that are equal for equal requests."""
    if isinstance(answer, list):
        return answer
    return {name: answer[name] for name in NUMBERS if name in answer}


# The path, the body around a text, and the pointer of the warning if the response has warnings.
REQUESTS = [
    ("/embeddings/", '{"sentences": ["a", "TEXT"]}', "/sentences/1"),
    ("/v1/embeddings", '{"input": ["TEXT", "b"]}', "/input/0"),
    ("/embed", '{"inputs": ["TEXT", "b"]}', None),
    ("/v2/embed", '{"texts": ["TEXT"], "input_type": "search_query"}', None),
    ("/tokenize", '{"inputs": ["TEXT"]}', None),
    ("/rerank", '{"query": "TEXT", "passages": ["a"]}', "/query"),
    ("/rerank", '{"query": "a", "passages": ["b", "TEXT"]}', "/passages/1"),
    ("/rerank", '{"query": "a", "texts": ["b", "TEXT"]}', None),
]


@pytest.mark.parametrize(("path", "body", "pointer"), REQUESTS)
def test_a_lone_surrogate_is_read_as_the_replacement_character(client, path, body, pointer) -> None:
    cut = post(client, path, body.replace("TEXT", CUT))
    read = post(client, path, body.replace("TEXT", READ))
    assert without_times(cut) == without_times(read)
    assert without_times(cut)
    if pointer is not None:
        (warning,) = cut["warnings"]
        assert (warning["code"], warning["severity"]) == ("surrogate_replaced", "warning")
        assert warning["target"]["pointer"] == pointer
        assert warning["target"]["field"] == pointer.split("/")[1]
        assert not read.get("warnings")
