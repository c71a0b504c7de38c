"""Building the kernels with the real program, in a copy of their folder."""

import json
import platform
import re
import sys
import tempfile
from pathlib import Path

import pytest

from smart_embedder.kernels import build
from smart_embedder.kernels.build import (
    AARCH64,
    X86_64,
    library_path,
)

FITTING = "flags\t\t: fpu avx fma avx2\n"


def interpreter(path: Path, log: Path, fails: str = "") -> str:
    """Make a Python that records its calls, installs nothing, and compiles to empty files."""
    path.write_text(
        f"#!{sys.executable}\n"
        "import json, os, pathlib, sys\n"
        f"log = open({str(log)!r}, 'a')\n"
        "log.write(json.dumps([sys.argv[1:], os.environ.get('PYTHONPATH', '')]) + '\\n')\n"
        "if '-o' in sys.argv: pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).touch()\n"
        f"if {fails!r} and {fails!r} in sys.argv: sys.exit('one\\ntwo')\n"
    )
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with two sources, and the shared one, in place of the real folder."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name in ("gemm.c", "threads.c", "rows.c", "rows.h"):
        (folder / name).write_text(name)
    monkeypatch.setattr(build, "FOLDER", folder)
    return folder


def test_library_path_depends_on_sources_and_architecture(sources: Path) -> None:
    before = {library_path(X86_64), library_path(AARCH64)}
    (sources / "rows.c").write_text("changed")
    assert len(before | {library_path(X86_64), library_path(AARCH64)}) == 4


def calls(log: Path) -> list[tuple[list[str], str]]:
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def test_build_installs_the_compiler_by_its_hash_and_builds_missing_libraries(
    sources: Path, monkeypatch, tmp_path: Path, capsys
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path / "python", log))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = sources / library_path(AARCH64).name
    other.touch()
    (sources / "kernels-older.so").touch()
    for machine in ("x86_64", "aarch64"):
        assert build.main(["--machine", machine]) == 0
    first, *compiled = capsys.readouterr().out.splitlines()
    assert first == "Fetching a compiler of 100 MB for the kernels"
    files = len(compiled)
    assert compiled == [f"{number} of {files} files compiled" for number in range(1, files + 1)]
    assert files > len(X86_64.sets)
    assert set(sources.glob("kernels-*")) == {library_path(X86_64), other}
    (fetched, _), *rest = calls(log)
    assert fetched[:3] == ["-m", "pip", "install"]
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(fetched)
    assert fetched[-2:] == ["--requirement", str(build.COMPILER)]
    package = fetched[fetched.index("--target") + 1]
    assert {path for _, path in rest} == {package}
    assert list(tmp_path.glob("smart-embedder-kernels-*")) == []
    assert sum("pip" in arguments for arguments, _ in calls(log)) == 1


@pytest.mark.parametrize("fails", ["pip", "-shared"])
def test_build_failure_is_one_sentence(
    fails: str, sources: Path, monkeypatch, tmp_path: Path, capsys
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path / "python", log, fails))
    assert build.main(["--machine", "aarch64"]) == 1
    assert capsys.readouterr().err == "The kernels could not be built: two\n"
    assert list(sources.glob("kernels-*")) == []


def test_build_does_nothing_on_an_unsupported_machine(
    sources: Path, monkeypatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path / "python", tmp_path / "log"))
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert build.main([]) == build.main(["--anywhere"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "log").exists()
    assert list(sources.glob("kernels-*")) == []


@pytest.mark.parametrize(
    ("machine", "libc", "flags", "anywhere", "can_run"),
    [
        ("x86_64", "glibc", FITTING, False, True),
        ("x86_64", "glibc", FITTING.replace("avx2", "sse4_2"), False, False),
        ("x86_64", "glibc", "flags: fpu\n", True, True),
        ("x86_64", "", FITTING, True, False),
        ("aarch64", "glibc", "asimddp", False, True),
        ("aarch64", "glibc", "bf16", False, False),
        ("aarch64", "glibc", "", True, True),
        ("arm64", "", "asimddp", True, False),
        ("riscv64", "glibc", FITTING, True, False),
    ],
)
def test_kernels_run_on_linux_with_avx2_or_dot_products(
    monkeypatch, machine, libc, flags, anywhere, can_run
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "arm_features", lambda: {flags})
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    monkeypatch.setattr(Path, "read_text", lambda *_: f"processor : 0\n{flags}")
    assert build.can_run_kernels(anywhere=anywhere) is can_run


def test_instruction_sets_match_the_c_headers() -> None:
    text = (library_path().parent / "vector.h").read_text()
    sizes = re.findall(r"enum \{ LANES = (\d+), REGISTERS = (\d+) \}", text)
    tiles = [int(lanes) * int(registers) for lanes, registers in sizes]
    tile_of = dict(zip(("avx512", "neon", "avx"), tiles, strict=True))
    for instructions in (*X86_64.sets, *AARCH64.sets):
        family = instructions.name.partition("_")[0].replace("avx2", "avx")
        assert instructions.tile == tile_of[family]
        assert instructions.matrix_rows == (2 if instructions.name == "neon_matrix" else 1)
        # AVX2 alone sums two products of bytes in 16 bits; the others sum four in 32.
        assert instructions.int8_weight_limit == (63 if instructions.name == "avx2" else 127)
