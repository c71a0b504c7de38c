"""What pip's lines tell: how far it is, and why it failed."""

import re
from dataclasses import dataclass
from pathlib import PurePath

from launcher.console import Progress

_PACKAGE = re.compile(
    r"(?:Collecting|Processing|Requirement already satisfied:|Ignoring) ([^\s=@:]+)"
)


@dataclass(slots=True)
class PipRun:
    """What is learnt from pip's lines: how far it is, whether it has begun to write, its error."""

    progress: Progress
    count: int
    collected: int = 0
    failed: bool = False
    wrote: bool = False
    error: str = "it says nothing"
    package: str = ""

    def follow(self, line: str) -> None:
        """Read one line."""
        if found := _PACKAGE.match(line):
            self.collected += 1
            self.package = PurePath(found[1]).name
            self._show(self.package)
        elif "Downloading" in line and (size := re.search(r"\(([^()]+B)\)$", line)):
            self._show(f"{self.package}, {size[1]}")
        elif line.startswith("Installing collected"):  # The only step that writes.
            self.wrote = True
            self._show("unpacking")
        elif line.startswith("ERROR:"):
            self.error = line.removeprefix("ERROR:").strip().rstrip(".")

    def _show(self, text: str) -> None:
        self.progress.detail(f"{min(self.collected, self.count)} of {self.count}, {text}")
