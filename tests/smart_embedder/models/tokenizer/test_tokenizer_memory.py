"""The memory of tokenization is bounded for any texts of a request."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.answering_process import answering_process
from tests.support.server import REPOSITORY
from tests.support.tokenizer_process import NUMBER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ALLOWED = 50 * 2**20
BODY_BYTES = 250_000
SCRIPTS = "aZ7éßЖωאبहไขあ漢각ᄀ\u0958ឃ"
LIGATURES = "ﷺﷻ㌖㋿ﬃ½㎯⒇ﬆ\U0001d160\U0001f240Ⅷ"
MARKS = "\u0301\u0323\u0338\u093c\u0e33\u200d\ufe0f\u0600\u064b"
SIGNS = " .-_\n\t\u3000\u00a0\x00▁👍🇩>。"
UNITS = st.text(st.sampled_from(SCRIPTS + LIGATURES + MARKS + SIGNS), min_size=1, max_size=4)
# Returns by how many bytes tokenizing grows the process; a text is a unit, repeated.
Growth = Callable[..., int]


@pytest.fixture(scope="module")
def growth() -> Iterator[Growth]:
    """Measure another process: Python does not count what the tokenizers library allocates."""
    command = [sys.executable, "-m", "tests.support.tokenizer_process"]
    with answering_process(command, PYTHONPATH=str(REPOSITORY)) as process:
        yield lambda model, folder, *texts: process.ask(
            model=model, folder=str(folder), texts=texts
        )


@pytest.fixture(scope="module", params=["tiny_m3", "tiny_qwen", "demo_checkpoint"])
def folder(request) -> Path:
    return request.getfixturevalue(request.param)


@given(unit=UNITS, texts=st.sampled_from([1, 40, 1024]))
@example(unit="ﷺ", texts=1)
@example(unit=". ", texts=1)
@settings(max_examples=1)
def test_tokenizer_memory_is_at_most_20_times_the_texts(
    growth, folder, unit: str, texts: int
) -> None:
    count = BODY_BYTES // len(unit.encode()) // texts
    assert growth("embedder", folder, (unit, count, texts)) <= 20 * BODY_BYTES + ALLOWED


def test_tokenizer_memory_does_not_grow_with_new_long_words(growth, folder) -> None:
    assert growth("embedder", folder, ("a" * 235 + NUMBER + " ", 5000, 1)) < ALLOWED


@pytest.mark.parametrize("query", [100, 30_000, 70_000])
def test_tokenizer_memory_holds_the_query_once(growth, tiny_qwen, query: int) -> None:
    texts = (("x ", query // 2, 1), ("y", 10, 1024))
    assert growth("reranker", tiny_qwen, *texts) <= 20 * (query + 10_240) + ALLOWED
