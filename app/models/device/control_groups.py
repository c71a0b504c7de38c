"""The control groups that limit this process, on Linux."""

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_of(controller: str, cgroups: Path, membership: Path) -> set[Path]:
    """The folders of the process's groups for a controller, of version 1 or 2, and those above."""
    folders = {cgroups, cgroups / controller}
    for line in read_or_empty(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = cgroups / controller if controllers else cgroups
            group = root / path.strip("/")
            folders |= {group, *group.parents} if group.is_relative_to(root) else set()
    return folders


def read_or_empty(path: Path) -> str:
    """The text of a system file; empty if there is no such file."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return ""
