"""NVIDIA's driver, asked through its own library: is it there, new enough, and does it see a GPU?

nvidia-smi would not do: it may be missing from PATH, and it knows nothing of CUDA's compatibility
libraries, with which an older driver is new enough.
"""

import ctypes

from launcher.console import SCRIPT, WINDOWS, LaunchError

LIBRARY = "nvcuda.dll" if WINDOWS else "libcuda.so.1"
CUDA_VERSION = 13_000  # As the driver counts: the version that the pinned torch is built for.
OLDEST_DRIVER = 580
_OTHERWISE = f"or use '{SCRIPT} local cpu'"


def require_gpu() -> None:
    """Raise `LaunchError` where the GPU build of torch could not use a GPU."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise LaunchError(
            f"local gpu needs an NVIDIA GPU, and its driver ({LIBRARY}) was not found: install "
            f"it, {_OTHERWISE}."
        ) from error
    version = _ask(driver, "cuDriverGetVersion")
    if 0 < version < CUDA_VERSION:
        raise LaunchError(
            f"the NVIDIA driver is too old: it knows CUDA up to {_name(version)}, and local gpu "
            f"needs {_name(CUDA_VERSION)}: install driver {OLDEST_DRIVER} or newer, {_OTHERWISE}."
        )
    if driver.cuInit(0) or not _ask(driver, "cuDeviceGetCount"):
        raise LaunchError(
            "local gpu needs an NVIDIA GPU, and the driver finds none that works: see what "
            f"nvidia-smi says, {_OTHERWISE}."
        )


def _ask(driver: ctypes.CDLL, question: str) -> int:
    """Return the number that a function of the driver writes; 0 where it fails."""
    answer = ctypes.c_int(0)
    return 0 if driver[question](ctypes.byref(answer)) else answer.value


def _name(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
