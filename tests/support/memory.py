"""How much memory a process takes at most, by the system's own count (Linux)."""

from pathlib import Path


def status_bytes(pid: int | str, name: str) -> int:
    """A field of `/proc/PID/status` such as `VmRSS`, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def forget_peak(pid: int | str) -> None:
    """Let `VmHWM`, the most memory that a process ever held, begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
