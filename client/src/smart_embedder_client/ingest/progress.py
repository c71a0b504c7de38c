"""The progress bar, and what is told while it runs."""

import sys
import time
from typing import Self

from tqdm import tqdm

from smart_embedder_client.terminal import plain


class Progress:
    """A bar on a terminal; elsewhere nothing but the notes.

    Args:
        total: Bytes of the input.
        title: What stands before the bar.
    """

    def __init__(self, total: int, title: str) -> None:
        self._began = time.monotonic()
        self._chunks = 0
        # disable=None is tqdm's way to say: no bar where stderr is no terminal.
        self._bar = tqdm(
            total=total,
            desc=plain(title),
            unit="B",
            unit_scale=True,
            disable=None,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def read(self, size: int) -> None:
        """Count the bytes of a document that is done."""
        self._bar.update(size)

    def store(self, chunks: int) -> None:
        """Count chunks that are stored."""
        self._chunks += chunks
        seconds = max(time.monotonic() - self._began, 1e-3)
        rate = f"{self._chunks} chunks, {self._chunks / seconds:.0f} chunks/s"
        self._bar.set_postfix_str(rate, refresh=False)

    def tell(self, sentence: str) -> None:
        """Print a line above the bar, where there is one."""
        if not self._bar.disable:
            self.note(sentence)

    def note(self, sentence: str) -> None:
        """Print a line, also where there is no bar."""
        tqdm.write(plain(sentence), file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
