"""The memory of tokenization is bounded for any texts of a request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.copied_process import CopiedProcess
from tests.support.tokenizer_process import NUMBER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

ALLOWED = 50 * 2**20
BODY_BYTES = 250_000


def measure_growth(model: str, folder: Path, *requests: list[tuple[str, int, int]]) -> list[int]:
    """Return by how many bytes tokenizing each request grows a process.

    Python does not count what the tokenizers library allocates. A text is a unit, repeated.
    """
    question = json.dumps({"model": model, "folder": str(folder), "requests": requests})
    process = CopiedProcess(
        "tests.support.tokenizer_process", [question], folder, os.environ, subprocess.PIPE
    )
    with process.stdout as stream:
        output = stream.read()
    assert process.wait() == 0, output
    return [int(line) for line in output.split()]


@pytest.mark.parametrize("name", ["tiny_m3", "tiny_qwen", "demo_checkpoint"])
def test_tokenizer_memory_is_at_most_20_times_the_texts(request, name: str) -> None:
    # One character that becomes 18, words of one letter, marks; in one text, and in many.
    units = [("ﷺ", 1), (". ", 1), ("漢a\u0301", 40), ("Ⅷ\u093c ", 1024)]
    bodies = [[(unit, BODY_BYTES // len(unit.encode()) // texts, texts)] for unit, texts in units]
    new_long_words = [("a" * 235 + NUMBER + " ", 5000, 1)]
    folder = request.getfixturevalue(name)
    *grown, by_words = measure_growth("embedder", folder, *bodies, new_long_words)
    assert max(grown) <= 20 * BODY_BYTES + ALLOWED
    assert by_words < ALLOWED


def test_tokenizer_memory_holds_the_query_once(tiny_qwen: Path) -> None:
    lengths = (100, 70_000)
    requests = [[("x ", length // 2, 1), ("y", 10, 1024)] for length in lengths]
    grown = measure_growth("reranker", tiny_qwen, *requests)
    for growth, length in zip(grown, lengths, strict=True):
        assert growth <= 20 * (length + 10_240) + ALLOWED
