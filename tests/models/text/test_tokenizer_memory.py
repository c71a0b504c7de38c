"""Whatever a request's texts are, tokenising them costs little more memory than they do."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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


class TokenizerProcess:
    """A process of its own, as Python does not count what the tokenizers library allocates."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def growth(self, model: str, folder: Path, *texts: tuple[str, int, int]) -> int:
        """Bytes by which tokenising grows it at most; `texts` are (unit, count, times)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([model, str(folder), texts]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@pytest.fixture(scope="module")
def process() -> Iterator[TokenizerProcess]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.tokenizer_process"],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        yield TokenizerProcess(running)


@pytest.fixture(scope="module", params=["tiny_m3", "tiny_qwen", "demo_checkpoint"])
def folder(request) -> Path:
    return request.getfixturevalue(request.param)


@given(unit=UNITS, texts=st.sampled_from([1, 40, 1024]))
@example(unit="ﷺ", texts=1)
@example(unit=". ", texts=1)
@settings(max_examples=4)
def test_texts_cost_at_most_20_times_their_size(process, folder, unit: str, texts: int) -> None:
    size = len(unit.encode())
    growth = process.growth("embedder", folder, (unit, BODY_BYTES // size // texts, texts))
    assert growth <= 20 * BODY_BYTES + ALLOWED


def test_long_words_that_are_all_new_are_not_remembered(process, folder) -> None:
    assert process.growth("embedder", folder, ("a" * 235 + NUMBER + " ", 5000, 1)) < ALLOWED


@pytest.mark.parametrize("query", [100, 30_000, 70_000])
def test_a_query_is_not_repeated_for_every_passage(process, tiny_qwen, query: int) -> None:
    texts = (("x ", query // 2, 1), ("y", 10, 1024))
    growth = process.growth("reranker", tiny_qwen, *texts)
    assert growth <= 20 * (query + 10_240) + ALLOWED
