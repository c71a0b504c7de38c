"""Building the kernels, in a copy of their folder, by the real program."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.models.ops import build
from app.models.ops.build import FOLDER, library_path
from app.models.ops.instruction_sets import AARCH64, ARCHITECTURES, X86_64, architecture_here
from app.models.ops.native_library import load_library, runnable_here

ROOT = Path(__file__).parents[3]
FITTING = "flags\t\t: fpu avx fma avx2\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the build needs of a checkout, with nothing built."""
    for package in ("app", "app/models"):
        (tmp_path / package).mkdir()
        shutil.copy(ROOT / package / "__init__.py", tmp_path / package)
    ignored = shutil.ignore_patterns("kernels-*", "__pycache__")
    shutil.copytree(FOLDER.parent, tmp_path / "app/models/ops", ignore=ignored)
    return tmp_path


def run(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.models.ops.build", *arguments],
        cwd=checkout,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def built(checkout: Path) -> list[str]:
    return [path.name for path in (checkout / "app/models/ops/csrc").glob("kernels-*")]


def fake_compiler(folder: Path, program: str) -> build.Compiler:
    """A package in the compiler's place, whose `python -m ziglang cc ...` runs `program`."""
    package = folder / "compiler" / "ziglang"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(program)
    return build.Compiler(package.parent, folder, architecture_here())


@pytest.mark.skipif(not library_path().is_file(), reason="the kernels are not built")
def test_what_is_built_runs_here_for_every_instruction_set_of_the_processor() -> None:
    assert all(load_library(each) is not None for each in runnable_here())


def test_where_it_is_built_nothing_is_fetched(checkout) -> None:
    (checkout / "app/models/ops/csrc" / library_path().name).touch()
    done = run(checkout, "--anywhere", PIP_NO_INDEX="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_package_index_it_says_so_and_leaves_nothing_behind(checkout, tmp_path) -> None:
    done = run(checkout, "--anywhere", PIP_NO_INDEX="1", TMPDIR=str(tmp_path))
    if platform.machine() not in ARCHITECTURES:
        pytest.skip("elsewhere there is nothing to build")
    assert done.returncode == 1
    assert "The kernels could not be built: ERROR: No matching distribution" in done.stderr
    assert built(checkout) == []
    assert list(tmp_path.glob("smart-embedder-kernels-*")) == []


def test_other_sources_have_another_library(checkout) -> None:
    names = []
    for change in ("", "/* changed */"):
        with (checkout / "app/models/ops/csrc/row_ops.c").open("a") as file:
            file.write(change)
        code = "from app.models.ops.build import library_path; print(library_path().name)"
        command = [sys.executable, "-c", code]
        asked = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
        names.append(asked.stdout.strip())
    assert names[0] == library_path().name
    assert names[1] != names[0]


def test_each_architecture_has_a_library_of_its_own(checkout) -> None:
    assert library_path(AARCH64) != library_path(X86_64)
    there = library_path(AARCH64).name
    (checkout / "app/models/ops/csrc" / there).touch()
    done = run(checkout, "--machine", "aarch64", PIP_NO_INDEX="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_new_library_takes_the_place_of_older_ones(monkeypatch, tmp_path) -> None:
    older, wanted = tmp_path / "kernels-0.so", tmp_path / "kernels-1.so"
    older.touch()
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "library_path", lambda _: wanted)
    write = "import sys; open(sys.argv[-1], 'w').write('new')"
    build.make_library(fake_compiler(tmp_path, write))
    assert wanted.read_text() == "new"
    assert list(tmp_path.glob("kernels-*")) == [wanted]


def test_a_compiler_that_fails_is_quoted_and_nothing_half_made_stays(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "library_path", lambda _: tmp_path / "kernels-1.so")
    fails = "import sys; open(sys.argv[-1], 'w'); sys.exit('row_ops.c:1: no\\nthat is all')"
    with pytest.raises(subprocess.CalledProcessError) as raised:
        build.make_library(fake_compiler(tmp_path, fails))
    assert build.explain(raised.value) == "that is all"
    assert list(tmp_path.glob("kernels-*")) == []


@pytest.mark.parametrize(
    ("machine", "libc", "flags", "anywhere", "of_use"),
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
def test_it_is_for_linux_with_avx2_or_dot_products(
    monkeypatch, machine, libc, flags, anywhere, of_use
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "arm_features", lambda: {flags})
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, "2.36"))
    monkeypatch.setattr(Path, "read_text", lambda *_: f"processor : 0\n{flags}")
    assert build.is_of_use(anywhere=anywhere) is of_use


def test_sets_of_instructions_tell_what_the_c_files_say() -> None:
    text = (library_path().parent / "vector.h").read_text()
    sizes = re.findall(r"enum \{ LANES = (\d+), REGISTERS = (\d+) \}", text)
    tiles = [int(lanes) * int(registers) for lanes, registers in sizes]
    tile_of = dict(zip(("avx512", "neon", "avx"), tiles, strict=True))
    for each in (*X86_64.sets, *AARCH64.sets):
        family = each.name.partition("_")[0].replace("avx2", "avx")
        assert each.tile == tile_of[family]
        assert each.matrix_rows == (2 if each.name == "neon_matrix" else 1)
        # Two products of bytes are summed in 16 bits where nothing sums four in 32.
        assert each.int8_weight_limit == (63 if each.name == "avx2" else 127)
