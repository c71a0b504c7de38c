"""start_server.bat, which wine's cmd runs if it is installed.

Batch files stand in for Python, docker and nvidia-smi; pyenv's python is a batch file, too.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.checkout import FLAVOURS, MEMORIES, ROOT, WITHOUT_PYTHON, sentence_of

# Debian keeps wine's own programs off the PATH.
FOLDERS = os.pathsep.join((os.environ["PATH"], "/usr/lib/wine"))
LIBRARIES, WINDOWS = Path("/usr/lib"), "wine/x86_64-windows"
BATCH_FILE = ROOT / "start_server.bat"
PYTHON = ('if "%~1"=="-c" exit /b 0', "echo ran {name} %*", "exit /b 7")
OLD_PYTHON = ("exit /b 1",)
CONFIG = tuple(
    f'if "%~4"=="config" echo       {name}: {value}'
    for name, value in (
        ("DEVICE", "gpu"),  # An argument of the build.
        ("DEVICE", "%DEVICE%"),
        ("DENSE_EMBEDDING_MODEL", "%DENSE_EMBEDDING_MODEL%"),
        ("RERANKER_MODEL", "%RERANKER_MODEL%"),
        ("QWEN_RERANK_BATCH_SIZE", "null"),
    )
)
DOCKER = (
    'if "%~1"=="{fails}" exit /b 1',
    'if "%~1 %~2"=="{fails}" exit /b 1',
    *CONFIG,
    'if "%~4"=="up" echo ran docker %*',
    'if "%~4"=="up" exit /b {up}',
    "exit /b 0",
)
NOT_UP = "docker compose could not start the service; its message above says why."


def find(*names: str) -> str:
    """Find the first installed program of these; skip the test if there is none."""
    for name in names:
        if program := shutil.which(name, path=FOLDERS):
            return program
    pytest.skip("wine is not installed: start_server.bat cannot be run")


def environment_of(wine: Path) -> dict[str, str]:
    """The environment of wine's programs: no .NET, no browser."""
    quiet = {"WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml="}
    home = {"HOME": str(wine), "WINEPREFIX": str(wine / "windows")}
    return quiet | home | {"PATH": os.environ["PATH"]}


@pytest.fixture(scope="module")
def wine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for wine whose Windows is links to its own programs.

    `wineboot --init` would copy them, which takes 15 seconds and 700 MB, and start services. Wine
    looks for programs there alone, so the tests do not find those on this machine's PATH.
    """
    find("wine64", "wine")
    server, folder = find("wineserver64", "wineserver"), tmp_path_factory.mktemp("wine")
    programs = (*LIBRARIES.glob(f"{WINDOWS}/*"), *LIBRARIES.glob(f"*/{WINDOWS}/*"))
    if not programs:
        pytest.skip(f"wine's programs are not in {LIBRARIES}: start_server.bat cannot be run")
    system = folder / "windows" / "drive_c" / "windows" / "system32"
    system.mkdir(parents=True)
    (folder / "windows" / ".update-timestamp").write_text("disable\n")
    for program in programs:
        (system / program.name).symlink_to(program)
    try:
        yield folder
    finally:
        for option in ("--kill", "--wait"):
            subprocess.run([server, option], env=environment_of(folder), check=False)


def windows_path(path: Path) -> str:
    """The path in wine of a file of this machine."""
    return "Z:" + str(path).replace("/", "\\")


def write_batch_file(file: Path, lines: tuple[str, ...]) -> Path:
    """Write a batch file with the line ends that cmd needs."""
    file.write_bytes("".join(f"{line}\r\n" for line in ("@echo off", *lines)).encode())
    return file


class Checkout:
    """A folder with start_server.bat in it, and the programs that it finds."""

    def __init__(self, wine: Path, folder: Path, name: str = "a checkout (x86) & more") -> None:
        self.wine = wine
        self.folder = folder / name
        self.programs = folder / "programs"
        for created in (self.folder, self.programs):
            created.mkdir()
        shutil.copy(BATCH_FILE, self.folder)
        (self.folder / "launcher").mkdir()
        for text in (ROOT / "launcher").glob("*.txt"):
            shutil.copy(text, self.folder / "launcher")

    def start(
        self, line: str = "", answers: str = "", **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run start_server.bat with these arguments."""
        return self.run(BATCH_FILE.name, *line.split(), answers=answers, **variables)

    def run(
        self, name: str, *arguments: str, answers: str = "", **variables: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a batch file in cmd. Its name begins with a dot, or wine's cmd takes it for `start`.

        Each start of wine takes seconds: one batch file calls start_server.bat for several cases.
        """
        programs = {"WINEPATH": windows_path(self.programs) + r";C:\windows\system32"}
        result = subprocess.run(
            [find("wine64", "wine"), "cmd", "/c", f".\\{name}", *arguments],
            env=environment_of(self.wine) | programs | {"DEVICE": "auto"} | variables,
            cwd=self.folder,
            input=answers,
            capture_output=True,
            text=True,
            check=False,
        )
        # Wine reports a crash of a program of its own, which happens on a busy machine.
        result.stderr = re.sub(r"(?m)^wine: .*\n", "", result.stderr)
        return result

    def add(self, name: str, lines: tuple[str, ...]) -> Path:
        return write_batch_file(self.programs / f"{name}.bat", lines)

    def add_python(self, name: str) -> Path:
        return self.add(name, tuple(line.format(name=name) for line in PYTHON))

    def add_docker(self, fails: str = "nothing", up: int = 0) -> None:
        self.add("docker", tuple(line.format(fails=fails, up=up) for line in DOCKER))


@pytest.fixture
def checkout(wine: Path, tmp_path: Path) -> Checkout:
    return Checkout(wine, tmp_path)


def test_the_first_working_python_gets_the_arguments_without_pythonpath(
    checkout: Checkout,
) -> None:
    names = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH")
    values = "".join(f"[%{name}%]" for name in names)
    checkout.add("python", (PYTHON[0], f"echo {values}"))
    checkout.add("python3", OLD_PYTHON)
    assert checkout.start("local", **dict.fromkeys(names, "mine")).stdout.strip() == "[][][]"
    checkout.add_python("python3")
    checkout.add("py", ('if not "%~1"=="-3.12" exit /b 103', "shift", *PYTHON))
    result = checkout.start("docker gpu --demo")
    assert (result.returncode, result.stderr) == (7, "")
    assert result.stdout.strip().endswith("-3.12 -m launcher docker gpu --demo")


def test_the_python_of_the_variable_is_used_and_must_work(checkout: Checkout) -> None:
    checkout.add_python("python")
    mine = write_batch_file(checkout.folder / "my python.bat", (PYTHON[0], "echo mine %*"))
    result = checkout.start("local cpu", PYTHON=windows_path(mine))
    assert result.stdout.split() == ["mine", "-m", "launcher", "local", "cpu"]
    named = windows_path(write_batch_file(checkout.folder / "old python.bat", OLD_PYTHON))
    assert sentence_of(checkout.start("local", PYTHON=named)) == (
        f'"PYTHON={named}" is not a working Python 3.11 or newer.'
    )


_TUNED = "%QWEN_RERANK_BATCH_SIZE% %QWEN_RERANK_MAX_LENGTH%"
TOLD = (
    *CONFIG,
    f'if "%~4"=="up" echo told %~3 %DENSE_EMBEDDING_MODEL% %RERANKER_MODEL% {_TUNED}',
    "exit /b 0",
)
QWEN = "Qwen/Qwen3-Reranker-0.6B"


def compose_starts(result: "subprocess.CompletedProcess[str]") -> list[list[str]]:
    """The file, models and limits of each start of compose, as far as they are set."""
    lines = [line for line in result.stdout.splitlines() if "told " in line]
    return [line.partition("told ")[2].split() for line in lines]


def test_docker_starts_without_python_and_local_says_that_it_is_missing(checkout: Checkout) -> None:
    """`auto` is the GPU if nvidia-smi finds one, else the CPU; `gpu` does not need nvidia-smi."""
    calls = [f"call .\\{BATCH_FILE.name} {line}" for line, _, _ in WITHOUT_PYTHON]
    without_docker = calls[: len(calls) - 2]
    cases = write_batch_file(checkout.folder / "cases.bat", tuple(without_docker))
    result = checkout.run(cases.name)
    sentences = [line.removeprefix("start_server: ") for line in result.stderr.splitlines()]
    expected = [sentence for _, _, sentence in WITHOUT_PYTHON][: len(without_docker)]
    assert len(sentences) == len(expected)
    for line, sentence in zip(sentences, expected, strict=True):
        assert line.strip().startswith(sentence)
    for _, fails, sentence in WITHOUT_PYTHON[-2:]:
        checkout.add_docker(fails=str(fails))
        assert sentence_of(checkout.start()).startswith(sentence)
    checkout.add_docker(up=14)
    result = checkout.start("gpu")
    assert result.returncode == 1
    assert "Set for this start: DEVICE=cuda." in result.stdout
    assert "ran docker compose -f docker-compose.gpu.yml up --build -d" in result.stdout
    assert result.stderr.strip() == f"start_server: {NOT_UP}"


def test_the_device_and_the_gpu_memory_choose_the_compose_file_and_the_limits(
    checkout: Checkout,
) -> None:
    checkout.add("docker", TOLD)
    checkout.add(
        "nvidia-smi", ('if "%~1"=="" exit /b %STATUS%', "for %%M in (%REPORT%) do echo %%M")
    )
    steps, expected = [f"set RERANKER_MODEL={QWEN}"], []
    for report, tuned in MEMORIES:
        steps += [f"set REPORT={' '.join(report)}", f"call .\\{BATCH_FILE.name} docker gpu"]
        expected.append(["docker-compose.gpu.yml", QWEN, *tuned.split()])
    steps.append("set RERANKER_MODEL=mine")
    for line, nvidia_smi, flavour in FLAVOURS:
        steps += [f"set STATUS={1 if nvidia_smi is None else nvidia_smi}"]
        steps += [f"call .\\{BATCH_FILE.name} {line}"]
        expected.append([f"docker-compose.{flavour}.yml", "mine"])
    steps += ["set DEVICE=cuda:1", f"call .\\{BATCH_FILE.name} docker"]
    expected.append(["docker-compose.gpu.yml", "mine"])
    cases = write_batch_file(checkout.folder / "cases.bat", tuple(steps))
    result = checkout.run(cases.name)
    assert compose_starts(result) == expected
    path = windows_path(checkout.folder / "docker-compose.gpu.yml")
    logs = f'Smart Embedder is starting. Logs: docker compose -f "{path}" logs -f'
    assert result.stdout.splitlines()[-1].strip() == logs


@pytest.mark.parametrize(
    ("answers", "variables", "expected"),
    [
        ("qwen\r\n", {"RERANKER_MODEL": "my/qwen3"}, "Qwen/Qwen3-Embedding-0.6B my/qwen3 1 2048"),
        ("", {}, "BAAI/bge-reranker-v2-m3"),
    ],
)
def test_it_asks_for_the_models_at_a_console(
    checkout: Checkout, answers: str, variables: dict[str, str], expected: str
) -> None:
    """What stands in for Windows' timeout ends well, as that does at a console.

    One answer at a time, because wine reads all that a pipe holds as one line.
    """
    checkout.add("docker", TOLD)
    checkout.add("timeout", ("exit /b 0",))
    result = checkout.start("docker cpu", answers=answers, **variables)
    assert compose_starts(result) == [["docker-compose.cpu.yml", *expected.split()]]
    assert result.stdout.count("BGE or QWEN [BGE]: ") == 2 - len(variables)
    assert re.search(r"(?m)^  QWEN  Qwen/\S+, 1.2 GB", result.stdout)
    for limit in ("QWEN_RERANK_BATCH_SIZE=1", "QWEN_RERANK_MAX_LENGTH=2048"):
        assert (f"Set for this start: {limit}." in result.stdout) == ("2048" in expected)


def test_the_batch_file_has_windows_line_ends_and_all_its_labels() -> None:
    text = BATCH_FILE.read_bytes()
    assert text.count(b"\n") == text.count(b"\r\n"), "cmd misses labels in files with bare newlines"
    labels = set(re.findall(rb"^:(\w+)", text, re.MULTILINE))
    jumps = set(re.findall(rb"\bgoto (\w+)|\bcall :(\w+)", text))
    assert {goto or call for goto, call in jumps} <= labels
