"""The memory of a process, from /proc (Linux)."""

from pathlib import Path


def status_bytes(pid: int | str, name: str) -> int:
    """Read a field of `/proc/PID/status`, such as `VmRSS`, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def reset_peak(pid: int | str) -> None:
    """Reset `VmHWM`, the peak memory of a process."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
