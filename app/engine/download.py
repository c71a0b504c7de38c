"""The progress of a model's download, which the loader reports and /health shows."""

from dataclasses import dataclass

_MEGABYTE, _GIGABYTE = 10**6, 10**9


@dataclass(frozen=True, slots=True)
class Download:
    """How much of a model's files is on the disk: `done` of `total` bytes."""

    model: str
    done: int
    total: int

    @property
    def percent(self) -> int:
        """The share of the bytes on the disk, rounded down: 100 only when all are there."""
        return 100 * self.done // self.total

    def __str__(self) -> str:
        return (
            f"{self.model} is being downloaded: {human_size(self.done)} of "
            f"{human_size(self.total)} ({self.percent} %)"
        )


class DownloadStatus:
    """The running download, or None; written by the loader's threads, read by any thread."""

    def __init__(self) -> None:
        self.current: Download | None = None


def human_size(count: int) -> str:
    """A number of bytes as text, in GB or, below one of them, in MB."""
    if count >= _GIGABYTE:
        return f"{count / _GIGABYTE:.1f} GB"
    return f"{count / _MEGABYTE:.0f} MB"
