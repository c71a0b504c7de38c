"""Files that images leave out of installed packages."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.slim_packages import slim


def test_a_library_without_symbols_works_and_is_not_changed_again(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("there is no compiler for Linux")
    library = tmp_path / "libtwice.so"
    source = (
        "static int hidden_one(int a) { return 2 * a; } int twice(int a) { return hidden_one(a); }"
    )
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O0", "-x", "c", "-", "-o", library],
        input=source.encode(),
        check=True,
    )
    (tmp_path / "libtwice.so.1").symlink_to(library)
    assert b"hidden_one" in library.read_bytes()
    slim(tmp_path)
    slimmed, changed = library.read_bytes(), library.stat().st_mtime_ns
    assert b"hidden_one" not in slimmed
    assert ctypes.CDLL(str(library)).twice(21) == 42
    slim(tmp_path)
    assert (library.read_bytes(), library.stat().st_mtime_ns) == (slimmed, changed)


def test_headers_tests_and_programs_are_removed_and_the_rest_stays(tmp_path: Path) -> None:
    kept = ["torch/bin/torch_shm_manager", "torch/testing/a.py", "other/include/a.h", "b/c.so"]
    removed = ["torch/bin/test_api", "torch/include/a.h", "torch/test/a", "x/tests/test_x.py"]
    for name in [*kept, *removed, "nvidia/nvrtc/include/a.h"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("no ELF")
    slim(tmp_path)
    left = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    assert sorted(left) == sorted(kept)
