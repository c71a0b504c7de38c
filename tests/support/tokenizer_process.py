"""Tokenizes the texts of requests, and prints for each request by how much its memory grew.

The argument is `{"model": MODEL, "folder": FOLDER, "requests": [[[UNIT, COUNT, TEXTS], ...], ...]}`
where MODEL is `embedder` or `reranker`: TEXTS texts, each of COUNT units. In a unit U+E000 stands
for its number, in letters.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path

from smart_embedder.models.heads.dense import DEFAULT_INSTRUCTION
from smart_embedder.models.rerankers.pairs import QwenPairs
from smart_embedder.models.tokenizer import TextTokenizer
from tests.support.memory import reset_peak, status_bytes

NUMBER = "\ue000"
_LETTERS = str.maketrans("0123456789", "aeioubdfgk")


def load(model: str, folder: str) -> Callable[[list[str]], object]:
    """Return the function that tokenizes the texts of a request for a model."""
    tokenizer = TextTokenizer.from_folder(Path(folder), 8192)
    call: Callable[[list[str]], object] = tokenizer.encode
    if model == "reranker":
        template = QwenPairs(tokenizer)
        call = lambda texts: template.fill(texts[0], texts[1:], DEFAULT_INSTRUCTION)  # noqa: E731
    call(["warm", "up"])
    return call


def texts_of(unit: str, count: int, times: int) -> list[str]:
    """Return `times` texts of `count` units."""
    if NUMBER not in unit:
        return [unit * count for _ in range(times)]
    return ["".join(unit.replace(NUMBER, str(i).translate(_LETTERS)) for i in range(count))] * times


def main() -> None:
    """Tokenize each request, and print the growth."""
    question = json.loads(sys.argv[1])
    call = load(question["model"], question["folder"])
    for request in question["requests"]:
        texts = [text for unit in request for text in texts_of(*unit)]
        ctypes.CDLL(None).malloc_trim(0)
        reset_peak("self")
        before = status_bytes("self", "VmRSS")
        kept = call(texts)
        sys.stdout.write(f"{status_bytes('self', 'VmHWM') - before}\n")
        del kept, texts


if __name__ == "__main__":
    main()
