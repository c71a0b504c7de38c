"""Chunks keep the token limit, and lose no word."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smart_embedder_client import Client
from smart_embedder_client.ingest.chunking import (
    Chunker,
    FileChunker,
    ServiceChunker,
    StoppedError,
)
from smart_embedder_client.ingest.errors import IngestError

from tests.support.checkpoints import corpus
from tests.support.server import RunningServer
from tests.support.texts import varied_texts

TOKENS, OVERLAP = 40, 10


@pytest.fixture(scope="module")
def client(server: RunningServer):
    with Client(server.url) as client:
        yield client


@pytest.fixture(params=["service", "file"])
def chunker(request: pytest.FixtureRequest, client: Client, tiny_m3: Path) -> Chunker:
    if request.param == "service":
        return ServiceChunker(client.count_tokens, TOKENS, OVERLAP)
    return FileChunker(tiny_m3 / "tokenizer.json", TOKENS, OVERLAP)


def count_model_tokens(client: Client, texts: list[str]) -> list[int]:
    """Count the tokens that the model reads, including special ones."""
    usage = [client.embed([text], return_colbert=False).usage for text in texts]
    return [counts["prompt_tokens"] for counts in usage]


@pytest.mark.parametrize("is_markdown", [False, True])
def test_chunks_do_not_exceed_the_token_limit(
    chunker: Chunker, client: Client, is_markdown: bool
) -> None:
    text = "\n\n".join(f"## Part {i}\n\n{line}" for i, line in enumerate(corpus(40)))
    chunker.prepare([text])
    chunks = chunker.split(text, is_markdown=is_markdown)
    counts = count_model_tokens(client, chunks)
    assert max(counts) <= TOKENS
    # The chunks are also well filled.
    assert sum(counts) / len(counts) > TOKENS / 3
    assert set(text.split()) == {word for chunk in chunks for word in chunk.split()}


def test_chunk_overlap_is_limited(client: Client) -> None:
    text = " ".join(f"{line}." for line in corpus(30, seed=3))
    overlapping, apart = (
        ServiceChunker(client.count_tokens, TOKENS, overlap).split(text) for overlap in (OVERLAP, 0)
    )
    assert "".join(apart).replace(" ", "") == text.replace(" ", "")
    repeated = sum(count_model_tokens(client, overlapping)) - sum(count_model_tokens(client, apart))
    assert 0 < repeated <= (OVERLAP + 2) * len(overlapping)


def test_short_text_is_one_chunk_and_text_without_spaces_is_split(
    chunker: Chunker,
) -> None:
    short, long = "  the river\n", "検索の言葉を調べる。" * 30
    chunker.prepare([short, long])
    assert chunker.split(short) == ["the river"]
    chunks = chunker.split(long)
    assert len(chunks) > 1
    assert "".join(dict.fromkeys(long)) == "".join(dict.fromkeys("".join(chunks)))
    chunker.stop()
    with pytest.raises(StoppedError):
        chunker.split(short)


def test_tokens_of_each_word_are_counted_once(client: Client) -> None:
    counted: list[str] = []

    def count(texts):
        counted.extend(texts)
        return client.count_tokens(texts)

    chunker = ServiceChunker(count, TOKENS, OVERLAP)
    texts = corpus(300)
    chunker.prepare(texts)
    for text in texts:
        chunker.split(text)
    assert len(counted) == len(set(counted))


def test_stop_ends_a_long_split() -> None:
    counted: list[str] = []

    def count(texts):
        counted.extend(texts)
        if len(counted) >= 100:
            chunker.stop()
        return [1] * len(texts)

    chunker = ServiceChunker(count, TOKENS, OVERLAP)
    with pytest.raises(StoppedError):
        chunker.split(" ".join(f"word{i}" for i in range(5_000)))
    assert len(counted) < 300
    # `prepare` stops, too.
    chunker = ServiceChunker(count, TOKENS, OVERLAP)
    with pytest.raises(StoppedError):
        chunker.prepare(str(i) for i in range(1_000))
    assert len(counted) < 500


def test_cache_of_counted_words_is_bounded() -> None:
    counter = ServiceChunker(lambda texts: [len(text) for text in texts])
    for start in range(0, 100_000, 1_000):
        counter.prepare(str(i) for i in range(start, start + 1_000))
    assert len(counter._known) <= 31_000
    assert counter.count_tokens("12 345 12") == 7


@given(st.lists(st.sampled_from([*varied_texts(40), *corpus(20)]), min_size=1, max_size=4))
@settings(max_examples=25)
def test_token_count_of_a_text_is_the_sum_over_its_words(client: Client, parts: list[str]) -> None:
    text = " ".join(parts)[:2000]
    assert ServiceChunker(client.count_tokens).count_tokens(text) == client.count_tokens([text])[0]


def test_invalid_tokenizer_file_is_reported_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (b"no json", b"{}", b"[]"):
        path.write_bytes(content)
        with pytest.raises(IngestError, match="tokenizer"):
            FileChunker(path, TOKENS, OVERLAP)
    with pytest.raises(IngestError, match="cannot be read"):
        FileChunker(tmp_path / "missing.json", TOKENS, OVERLAP)


def test_truncation_in_the_tokenizer_file_is_ignored(tiny_m3: Path, tmp_path: Path) -> None:
    """Beyond it no token would be counted."""
    tokenizer = json.loads((tiny_m3 / "tokenizer.json").read_text())
    tokenizer["truncation"] = {
        "direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    text = " ".join(f"word{i}" for i in range(600))
    chunks = FileChunker(path, 200, 0).split(text)
    assert len(chunks) > 3
