"""The download of a model at the start: the loader reports it, and /health shows it."""

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
        """The part of the bytes that is on the disk, rounded down; 100 only where all are."""
        return 100 * self.done // self.total

    def __str__(self) -> str:
        return (
            f"{self.model} is being downloaded: {human_size(self.done)} of "
            f"{human_size(self.total)} ({self.percent} %)"
        )


class DownloadStatus:
    """The download that is under way; None where there is none.

    The loader's threads write it, and any thread may read it.
    """

    def __init__(self) -> None:
        self.current: Download | None = None


def human_size(count: int) -> str:
    """A number of bytes for people: in GB from one of them on, else in MB."""
    if count >= _GIGABYTE:
        return f"{count / _GIGABYTE:.1f} GB"
    return f"{count / _MEGABYTE:.0f} MB"
