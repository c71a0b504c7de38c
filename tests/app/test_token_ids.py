"""TOKEN_IDS: the ids of OpenAI's tokens are read as the texts for which they stand."""

import hashlib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import token_ids
from app.errors import BodyTooLargeError
from app.token_ids import ENCODINGS, Encoding, TokenTable
from smart_embedder.errors import InvalidRequestError, StartupError
from tests.app.conftest import answered, serving
from tests.support.texts import varied_texts

# The SHA-1 of the file's address, as tiktoken names it.
FILE = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
END = 100_257
TOKENS = [*(bytes([byte]) for byte in range(256)), b"search ", "😀".encode(), b"many " * 20]
CONTENT = b"".join(b"%s %d\n" % (b64encode(token), id_) for id_, token in enumerate(TOKENS))
TEXTS = [*varied_texts(9), "😀 emoji <|endoftext|>", "search search", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A folder with a table of a few tokens, which takes the place of cl100k's."""
    folder: Path = tmp_path_factory.mktemp("tiktoken")
    (folder / FILE).write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENCODINGS, "cl100k", Encoding(digest, ENCODINGS["cl100k"].special))
        yield folder


@pytest.fixture
def table(folder: Path) -> TokenTable:
    return TokenTable.load("cl100k", folder, max_bytes=1000)


def encode(text: str) -> list[int]:
    """Return an id for each byte, and longer tokens where they begin with these bytes."""
    ids: list[int] = []
    for part in text.split("search "):
        ids += [*part.encode(), 256]
    return ids[:-1]


@pytest.mark.parametrize("carrier", token_ids._CARRIERS)
def test_the_table_is_found_in_a_package(folder, tmp_path, monkeypatch, carrier) -> None:
    monkeypatch.setattr(token_ids.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(StartupError, match=f"cl100k_base.tiktoken: save it as {FILE} in"):
        TokenTable.load("cl100k", None, 10)
    (tmp_path / carrier).mkdir(parents=True)
    (tmp_path / carrier / FILE).write_bytes(CONTENT)
    found = TokenTable.load("cl100k", tmp_path, 10)
    assert found == TokenTable.load("cl100k", folder, 10)
    assert found.tokens[256] == b"search "
    assert found.tokens[END] == b"<|endoftext|>"


def test_another_file_stops_the_start(folder, tmp_path) -> None:
    (tmp_path / FILE).write_bytes(CONTENT[:-1])
    with pytest.raises(StartupError, match="is not the table"):
        TokenTable.load("cl100k", tmp_path, 10)


def test_a_table_that_cannot_be_read_stops_the_start_in_one_sentence(folder, monkeypatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StartupError, match=f"the table cannot be read: .*{FILE}"):
        TokenTable.load("cl100k", folder, max_bytes=1000)


async def decoded(table: TokenTable, value: Any) -> Any:
    body = {"input": value, "model": "m"}
    await table.decode_input(body, lambda _: None)
    return body["input"]


async def test_ids_are_decoded_to_the_text_and_texts_stay(table) -> None:
    assert await decoded(table, encode("search 世界 search ")) == ["search 世界 search "]
    assert await decoded(table, [encode(text) for text in TEXTS]) == TEXTS
    assert await decoded(table, [97, END, 98]) == ["a<|endoftext|>b"]
    # As tiktoken decodes a list that ends within a character.
    emoji = list("😀".encode())
    assert await decoded(table, [emoji[:2], emoji, [257, *emoji[3:]]]) == [
        "\ufffd",
        "😀",
        "😀\ufffd",
    ]
    for texts in (["a", "b"], "a", [], None, {"text": "a"}, [{"text": "a"}], [True], [1.5]):
        assert await decoded(table, texts) == texts


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 99_999], "the token id 99999, which cl100k does not have"),
        ([[1], [-1]], "the token id -1"),
        ([1, True], "mixes token ids and other values"),
        ([[1], ["a"]], "mixes token ids and other values"),
        ([[1], "a"], "mixes token ids and texts"),
    ],
)
async def test_other_values_than_ids_of_the_table_are_refused(table, value, message) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        await table.decode_input({"input": value}, lambda _: None)
    assert refused.value.problems[0]["pointer"] == "/input"


async def test_the_limit_counts_decoded_bytes_and_memory_is_reserved_for_them(table) -> None:
    reserved = list[int]()
    await table.decode_input({"input": [[258] * 4, [97]]}, reserved.append)
    assert reserved == [400, 1]
    with pytest.raises(BodyTooLargeError, match="more than 1000 bytes"):
        await table.decode_input({"input": [[258] * 6, [258] * 5]}, reserved.append)


@pytest.fixture(scope="module")
def client(tiny_m3: Path, folder: Path):
    """A client of a service that decodes ids and reads bodies of 100,000 bytes."""
    with serving(
        embedding_model=str(tiny_m3),
        token_ids="cl100k",
        tiktoken_cache_dir=folder,
        max_body_bytes=100_000,
        max_sentences_per_request=10,
    ) as client:
        yield client


def test_vectors_of_ids_are_those_of_the_text_to_the_last_bit(client) -> None:
    texts = [*TEXTS, "search " * 300]
    for path in ("/v1/embeddings", "/embeddings", "/openai/deployments/tiny-m3/embeddings"):
        expected = answered(client, path, input=texts)
        assert answered(client, path, input=[encode(text) for text in texts]) == expected
        alone = answered(client, path, input=encode(texts[-1]))
        assert alone["data"] == [expected["data"][-1] | {"index": 0}]


def test_more_ids_than_values_are_read_and_the_decoded_text_is_limited(client) -> None:
    ids = [7] * 40_000
    assert answered(client, "/v1/embeddings", input=ids)["data"]
    for body in ({"input": [258] * 2000}, {"input": [[258] * 500] * 4}):
        refused = client.post("/v1/embeddings", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
        assert "MAX_BODY_BYTES" in refused.json()["error"]["message"]
    # The native API and that of text-embeddings-inference read no ids.
    for path, field, status in (("/embeddings", "sentences", 422), ("/embed", "inputs", 422)):
        assert client.post(path, json={field: ids}).status_code == status
        assert client.post(path, json={field: [1, 2]}).status_code == status
