"""Every fenced block of the documentation, where it stands, and what its mark says of it.

A mark is an HTML comment on the line before the fence. Without one a block is run.

    <!-- needs Docker -->            also: a GPU, or: Docker and a GPU
    <!-- output -->                  what the block before prints, all of it
    <!-- output, in part -->         for JSON: some of its fields

A file whose first lines hold `<!-- every block takes long -->` marks all of its blocks at once.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.support.server import REPOSITORY

OUTPUT, PART_OF_OUTPUT = "output", "output, in part"
LONG = "takes long"
NEEDS = ("needs Docker", "needs a GPU", "needs Docker and a GPU", LONG)
MARKS = (OUTPUT, PART_OF_OUTPUT, *NEEDS)

_FENCE = re.compile(r"( *)(`{3,}|~{3,}) *(\S*)")
_COMMENT = re.compile(r" *<!-- (.+) --> *")
_ALL_TAKE_LONG = "<!-- every block takes long -->"
_HEAD_LINES = 5


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is that of its opening fence."""

    file: str
    line: int
    language: str
    text: str
    mark: str | None

    @property
    def place(self) -> str:
        """Where to find it."""
        return f"{self.file}:{self.line}"

    @property
    def is_output(self) -> bool:
        """Whether it shows what the block before prints."""
        return self.mark in {OUTPUT, PART_OF_OUTPUT}


@dataclass(frozen=True, slots=True)
class Run:
    """A block that can be run, and the block with its output, where there is one."""

    block: Block
    output: Block | None


def documents() -> list[Path]:
    """The files that people read first."""
    return [REPOSITORY / "README.md", REPOSITORY / "SECURITY.md", *sorted(_docs().glob("*.md"))]


def blocks_of(file: Path) -> Iterator[Block]:
    """The fenced blocks of one file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    name = file.relative_to(REPOSITORY).as_posix()
    default = LONG if _ALL_TAKE_LONG in lines[:_HEAD_LINES] else None
    numbered = enumerate(lines, start=1)
    before = ""
    for number, line in numbered:
        if fence := _FENCE.match(line):
            text = "\n".join(_until_closed(numbered, fence[2], len(fence[1])))
            yield Block(name, number, fence[3], text, _mark(before) or default)
        before = line


def all_blocks() -> list[Block]:
    """The fenced blocks of all documents."""
    return [block for file in documents() for block in blocks_of(file)]


def all_runs() -> list[Run]:
    """Every block that is no output, with its output."""
    blocks: list[Block | None] = [*all_blocks(), None]
    return [
        Run(block, after if after and after.is_output else None)
        for block, after in pairwise(blocks)
        if block and not block.is_output
    ]


def _until_closed(numbered: Iterable[tuple[int, str]], fence: str, indent: int) -> Iterator[str]:
    for _, line in numbered:
        if line.strip() == fence:
            return
        yield line[indent:]
    raise AssertionError("a fence is not closed")


def _mark(line: str) -> str | None:
    found = _COMMENT.fullmatch(line)
    return found[1] if found else None


def _docs() -> Path:
    return REPOSITORY / "docs"
